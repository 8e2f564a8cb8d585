"""A worker process, seen from the pool: starting it, sending jobs, reading answers, ending it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ...utils.show import describe_exit
from .answers import Answer, InvalidAnswerError, decode
from .channel import CHUNK_BYTES, Channel
from .episode_log import Job
from .limits import PoolLimits
from .scratch import clear

# sys.path is an argument, since every Python that an environment starts would inherit PYTHONPATH.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from g2po_trl.environments.pool.worker import main; main(int(sys.argv[1]), sys.argv[2])"
)


@dataclass(frozen=True)
class WorkerFailure:
    """Loss of a worker: its kind, `"timeout"` or `"crash"`, its message, and the running job if any."""

    kind: str
    message: str
    job: Job | None


class WorkerProcess:
    """One process, its channel, and its pending jobs in order.

    Jobs can be sent at any time. The worker says when it has loaded the environment and when it starts a job, whose
    time limit begins then, or when a larger answer goes on to arrive: a slow poller times out no healthy worker.

    `setup` is the first message, `withheld` names environment variables that the process does not get.
    """

    def __init__(self, setup: bytes, withheld: Sequence[str], limits: PoolLimits):
        ours, theirs = socket.socketpair()
        self.scratch = tempfile.mkdtemp(prefix="g2po-worker-")  # removed when the worker ends
        try:
            self.process = self._start(theirs.fileno(), withheld)
        except OSError as error:
            ours.close()
            clear([self.scratch])
            error.add_note("Use fewer environment workers (num_environment_workers), or raise ulimit -n and -u.")
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        self.pending_jobs: deque[Job] = deque()
        self.loaded = False  # the environment factory
        self.job_started = False  # the first pending job runs; if not, no job can have killed the worker
        self.ended_episodes: list[int] = []  # not sent yet
        self.draining = False  # accepts no new episodes
        self.over_memory = ""  # why its episodes must be reassigned
        self.resets = self.resets_at_memory_check = 0
        self._ending: threading.Thread | None = None
        self.limits = limits
        self._restart_deadline()
        self.channel.send(setup)

    def _start(self, descriptor: int, withheld: Sequence[str]) -> subprocess.Popen:
        path = json.dumps([folder or os.getcwd() for folder in sys.path if isinstance(folder, str)])  # as import does
        variables = {name: value for name, value in os.environ.items() if name not in withheld}
        # -P: modules are imported from the trainer's path, not from a copy in the current folder.
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, path, str(descriptor), self.scratch],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,  # input() raises instead of reading the trainer's terminal
            env={**variables, "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch},
            process_group=0,  # processes that an environment starts end with the worker
        )

    def send(self, jobs: Sequence[Job]) -> None:
        """Send jobs, and the numbers of ended episodes."""
        jobs_sent = [(job.number, job.episode.number, job.command, job.argument, job.expected) for job in jobs]
        self.channel.send(pickle.dumps((self.ended_episodes, jobs_sent)))
        self.ended_episodes = []
        idle = not self.pending_jobs
        self.pending_jobs += jobs
        self.resets += sum(job.command == "reset" for job in jobs)
        if idle and self.loaded:
            self._restart_deadline()

    def receive(self) -> list[bytes]:
        """Return the messages received by now. Raises `EOFError` if the worker has ended."""
        before = self.channel.partial_bytes
        messages = self.channel.receive()
        if self.channel.partial_bytes >= before + CHUNK_BYTES:  # an answer in drops does not extend the time limit
            self._restart_deadline()
        return messages

    def handle(self, message: bytes) -> tuple[Job, Answer] | None:
        """Return the job and answer in a message; `None` if it reports loading or the start of a job.

        Raises:
            InvalidAnswerError: if the message is unexpected. The worker's further messages are then unusable.
        """
        delivered = None
        if message:
            answer = decode(message, self.pending_jobs[0].episode.pictures if self.job_started else {})
            if not self.job_started or answer.job != self.pending_jobs[0].number:
                raise InvalidAnswerError("an answer to no pending job")
            delivered = self.pending_jobs.popleft(), answer
        elif self.job_started or (self.loaded and not self.pending_jobs):
            raise InvalidAnswerError("a start of a job that was not sent")
        self.job_started = self.loaded and not message
        self.loaded = True
        self._restart_deadline()
        return delivered

    def flush(self) -> None:
        """Send more of the jobs. What is still being sent has not begun: its time limit starts again."""
        before = self.channel.unsent
        self.channel.flush()
        if self.channel.unsent < before:
            self._restart_deadline()

    def _restart_deadline(self) -> None:
        """Start the time limit of loading or of the next job."""
        command = self.pending_jobs[0].command if self.pending_jobs else "reset"
        of_job = getattr(self.limits, f"environment_{command}_timeout")
        self.limit = of_job if self.loaded else self.limits.load_timeout
        self.deadline = time.monotonic() + self.limit

    def is_late(self) -> bool:
        """Return whether a job has exceeded its time limit."""
        return bool(self.pending_jobs) and time.monotonic() > self.deadline

    def must_be_replaced(self) -> bool:
        """Return whether it has had its resets or is `over_memory`, which is measured after a reset only."""
        limit = self.limits.environment_worker_memory_mb
        if limit is not None and self.resets > self.resets_at_memory_check:
            self.resets_at_memory_check, memory = self.resets, self.memory() / 2**20
            if memory > limit:
                how = f"it used {memory:,.0f} MiB, and environment_worker_memory_mb is {limit:,.0f}"
                self.over_memory = f"its worker was replaced: {how}"
        return bool(self.over_memory) or self.resets >= (self.limits.environment_worker_resets or float("inf"))

    def memory(self) -> int:
        """Return the resident bytes of the process and its children; 0 if it has died."""
        try:
            process = psutil.Process(self.process.pid)
            return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    def fail(self, kind: str, name: str, why: str) -> WorkerFailure:
        """End it after a `"timeout"` or a `"crash"` (`why`, if not by itself). `name`: of the environment."""
        job = self.pending_jobs[0] if self.job_started else None
        status = self.end()
        when = f"during {job.command} of slot {job.episode.slot}" if job else "before it started a job"
        when = when if self.loaded else "while it was loading"
        if kind == "timeout":
            hint = "" if self.loaded else "; if its imports are only slow, raise environment_load_timeout"
            message = f"{when}, {name} took more than {self.limit:g} s; its worker was killed{hint}"
            return WorkerFailure("timeout", message, job)
        how = "it closed its connection" if status is None else describe_exit(status)
        return WorkerFailure("crash", f"the worker process of {name} {why or f'died ({how})'} {when}", job)

    def end(self, patience: float = 0.0, wait: float = 0.1) -> int | None:
        """Close the channel and end the process, its children and its files; return its exit status if it has ended.

        It has `patience` seconds to end by itself. `wait` seconds are waited here; the rest happens in a thread.
        """
        self.channel.close()
        self._ending = threading.Thread(target=self._end, args=(patience,), daemon=True)
        self._ending.start()
        self._ending.join(wait)
        return self.process.returncode

    def _end(self, patience: float) -> None:
        self.stop(patience)
        clear([self.scratch])

    def stop(self, patience: float) -> None:
        """Wait for the end of the process at most `patience` seconds, then kill it and its group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the process group is empty
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may have left its group
        self.process.wait()

    @property
    def in_service(self) -> bool:
        return self._ending is None

    @property
    def has_ended(self) -> bool:
        return self._ending is not None and not self._ending.is_alive()


def end_all(workers: list[WorkerProcess], owner: int) -> None:
    """End all workers at the same time, unless this process is a fork of their owner.

    No thread is started, since the interpreter may be shutting down.
    """
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.channel.close()  # all at once, so that they end in parallel
    deadline = time.monotonic() + 2.0
    for worker in workers:
        worker.stop(max(0.0, deadline - time.monotonic()))
    clear([worker.scratch for worker in workers])
    workers.clear()
