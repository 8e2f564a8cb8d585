"""A worker process, seen from the pool: starting it, sending jobs, reading answers, ending it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from ...utils.errors import G2POError
from ...utils.images import Picture
from .answers import Answer, InvalidAnswerError, decode
from .channel import CHUNK_BYTES, Channel
from .limits import PoolLimits
from .scratch import clear

# sys.path is an argument, since every Python that an environment starts would inherit PYTHONPATH.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from g2po_trl.environments.pool.worker import main; main(int(sys.argv[1]), sys.argv[2])"
)


@dataclass(frozen=True)
class Job:
    """One reset or step of an episode."""

    episode: int  # its unique number
    slot: int
    command: str  # "reset" or "step"
    argument: Any  # the pickled task of a reset, or the action of a step
    expected: str | None  # the digest of its answer if it is a replay
    limit: float  # seconds
    # Images that the episode has shown, by their hashes; its worker sends each once.
    pictures: dict[str, Picture] = field(compare=False, repr=False)
    number: int = field(default_factory=lambda: secrets.randbits(62))  # in the answer; so none can be forged


def pickled(value: Any) -> bytes:
    """Return the pickled value. Raises `G2POError` if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise G2POError(
            f"tasks or actions cannot be sent to worker processes ({error}): keep plain data in the dataset", "tasks"
        ) from error


class WorkerProcess:
    """One process, its channel, and its pending jobs in order.

    Jobs can be sent at any time. The time limit of the running job starts when the previous answer is read. Any
    traffic resets the deadline, so a slow poller does not time out a healthy worker.

    `setup` is the first message, `withheld` names environment variables that the process does not get.
    """

    def __init__(self, setup: bytes, withheld: Sequence[str], limits: PoolLimits):
        self.scratch = tempfile.mkdtemp(prefix="g2po-worker-")  # removed when the worker ends
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(clear, [self.scratch])
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            with theirs:
                self.process = self._start(theirs.fileno(), withheld)
            on_failure.pop_all()
        self.channel = Channel(ours)
        self.pending_jobs: deque[Job] = deque()
        self.loaded = False  # the environment factory
        self._unstarted_lists: deque[int] = deque()  # numbers of jobs in the lists that it has not started
        self._started_jobs = 0  # jobs left of the list that it has started
        self._progress_bytes = 0  # bytes of a partial answer when it last reset the deadline
        self.ended_episodes: list[int] = []  # not sent yet
        self.draining = False  # accepts no new episodes
        self.over_memory = ""  # why its episodes must be reassigned
        self.resets, self.resets_at_memory_check = 0, 0  # the latter: resets at the last memory check
        self._ending: threading.Thread | None = None
        self.limits, self.load_limit = limits, limits.load_timeout
        self.deadline = time.monotonic() + self.load_limit
        self.channel.send(setup)

    def _start(self, descriptor: int, withheld: Sequence[str]) -> subprocess.Popen:
        if os.name == "nt":
            raise OSError("environments run in POSIX process groups, which Windows does not have: use WSL")
        path = json.dumps([folder or os.getcwd() for folder in sys.path if isinstance(folder, str)])  # as import does
        variables = {name: value for name, value in os.environ.items() if name not in withheld}
        # -P: modules are imported from the trainer's path, not from a copy in the current folder.
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, path, str(descriptor), self.scratch],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,  # input() raises instead of reading the trainer's terminal
                env={**variables, "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch},
                process_group=0,  # processes that an environment starts end with the worker
            )
        except OSError as error:
            remedy = "use fewer workers (num_environment_workers), or raise the limits of processes (ulimit -n, -u)"
            message = f"no environment worker can be started with {sys.executable!r} ({error}): {remedy}"
            raise OSError(error.errno, message) from error

    def send(self, jobs: Sequence[Job]) -> None:
        """Send jobs, and the numbers of ended episodes."""
        jobs_sent = [(job.number, job.episode, job.command, job.argument, job.expected) for job in jobs]
        message = pickled((self.ended_episodes, jobs_sent))
        self.ended_episodes = []
        idle = not self.pending_jobs
        self.pending_jobs += jobs
        if jobs:
            self._unstarted_lists.append(len(jobs))
        self.resets += sum(job.command == "reset" for job in jobs)
        if idle and self.loaded:
            self._restart_deadline()
        self.channel.send(message)

    def flush(self) -> None:
        """Send unsent bytes; progress resets the deadline of a worker without a running job."""
        before = self.channel.bytes_sent
        self.channel.flush()
        if self.channel.bytes_sent > before and self.loaded and not self.job_started:
            self._restart_deadline()

    def receive(self) -> list[bytes]:
        """Return the messages received by now. Raises `EOFError` if the worker has ended."""
        messages = self.channel.receive()
        partial_bytes = self.channel.partial_bytes
        if messages or partial_bytes < self._progress_bytes:
            self._progress_bytes = 0
        if partial_bytes >= self._progress_bytes + (CHUNK_BYTES if self._progress_bytes else 1):
            self._progress_bytes = partial_bytes  # single bytes of an answer do not reset the deadline
            self._restart_deadline()
        return messages

    def handle(self, message: bytes) -> tuple[Job, Answer] | None:
        """Return the job and answer in a message; `None` if it reports loading or the start of a list of jobs.

        Raises:
            InvalidAnswerError: if the message is unexpected. The worker's further messages are then unusable.
        """
        delivered = None
        if message:
            answer = decode(message, self.pending_jobs[0].pictures if self.job_started else {})
            if not self.job_started or answer.job != self.pending_jobs[0].number:
                raise InvalidAnswerError("an answer to no pending job")
            delivered = self.pending_jobs.popleft(), answer
            self._started_jobs -= 1
        elif self.loaded:
            if self.job_started or not self._unstarted_lists:
                raise InvalidAnswerError("a start of jobs that were not sent")
            self._started_jobs = self._unstarted_lists.popleft()
        self.loaded = True
        self._restart_deadline()
        return delivered

    @property
    def job_started(self) -> bool:
        """Whether the next job is running; if not, no job can have killed the worker."""
        return self._started_jobs > 0

    def _restart_deadline(self) -> None:
        """Start the time limit of the next job."""
        if self.loaded and self.pending_jobs:
            self.deadline = time.monotonic() + self.pending_jobs[0].limit

    def is_late(self, now: float) -> bool:
        """Return whether a job has exceeded its time limit."""
        return bool(self.pending_jobs) and now > self.deadline

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def is_old(self, live: int, draining: int) -> bool:
        """Return whether it has had its resets, and may be replaced now.

        It finishes its `live` episodes while its replacement starts; since both use memory, a quarter of the workers
        do so at a time.
        """
        resets = self.limits.environment_worker_resets
        may_drain = not live or draining < max(1, self.limits.workers // 4)
        return resets is not None and self.resets >= resets and may_drain

    def too_big(self, live: int) -> str:
        """Return why it exceeds its memory limit, or an empty text; checked once per `live` resets."""
        limit = self.limits.environment_worker_memory_mb
        if limit is None or self.resets - self.resets_at_memory_check < max(1, live):
            return ""
        self.resets_at_memory_check = self.resets
        memory = self.memory() / 2**20
        text = f"its worker was replaced: it used {memory:,.0f} MiB, and environment_worker_memory_mb is {limit:,.0f}"
        return text if memory > limit else ""

    def memory(self) -> int:
        """Return the resident bytes of the process and its children; 0 if it has died."""
        try:
            process = psutil.Process(self.process.pid)
            return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    def end(self, patience: float = 0.0, wait: float = 0.1) -> int | None:
        """Close the channel and end the process, its children and its files; return its exit status if it has ended.

        It has `patience` seconds to end by itself. `wait` seconds are waited here; the rest happens in a thread.
        """
        if self._ending is None:
            self.channel.close()
            self._ending = threading.Thread(target=self._end, args=(patience,), daemon=True)
            self._ending.start()
        self._ending.join(max(0.0, wait))
        return self.process.returncode

    def _end(self, patience: float) -> None:
        self._stop(patience)
        clear([self.scratch])

    def _stop(self, patience: float) -> None:
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
        patience = max(0.0, deadline - time.monotonic())
        if worker.in_service:
            worker._stop(patience)
        else:
            worker._ending.join(patience)
    clear([worker.scratch for worker in workers])
    workers.clear()
