"""A worker process, seen from the pool: how it is started, spoken to and ended."""

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
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from ...utils.masking import is_secret_variable
from .answers import Answer, NoAnswerError, decode
from .channel import PIECE, Channel
from .scratch import clear, make_scratch

# sys.path goes as an argument: as PYTHONPATH it would go on to every Python that an environment starts.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from g2po_trl.environments.pool.worker import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)


def withheld_variables(passed: Sequence[str] = ()) -> list[str]:
    """Environment variables of this process that look like a secret by their names, but for those passed.

    Raises:
        ValueError: when a name to be passed is not set.
    """
    unknown = sorted(set(passed) - set(os.environ))
    if unknown:
        raise ValueError(f"environment_variables names {', '.join(unknown)}, not set here: export it, or leave it out")
    return sorted(name for name in os.environ if is_secret_variable(name) and name not in passed)


@dataclass(frozen=True)
class Job:
    """One reset or step.

    Args:
        episode: number of the episode; no two have the same.
        argument: of a reset the pickled task, of a step the action.
        expected: the mark of its answer when it is played again.
        limit: seconds it may take.
        kind: which times it is to be measured with.
        number: its answer's, too. What runs in a worker and is no part of it cannot guess the number.
    """

    episode: int
    slot: int
    command: str
    argument: Any
    expected: str | None
    limit: float
    kind: str
    number: int = field(default_factory=lambda: secrets.randbits(62))


def pickled(value: Any) -> bytes:
    """The value, as it is sent.

    Raises:
        ValueError: when it cannot be.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"tasks or actions cannot be sent to worker processes ({error}): keep plain data in the dataset"
        ) from error


class WorkerProcess:
    """One process, its channel, and the jobs it still owes an answer for, in the order it works on them.

    More jobs can be sent at any time. The one that it works on has its time limit from when the answer before was
    taken; whatever the process says or takes in is a sign of life, so that it does not suffer for a pool that seldom
    listens.

    Args:
        setup: its first message.
        withheld: environment variables it does not get.
        load_limit: seconds importing the environment may take.

    Raises:
        OSError: when the process cannot be started; nothing of it is left then.
    """

    def __init__(self, setup: bytes, withheld: Sequence[str], load_limit: float):
        self.scratch, lock = make_scratch()  # goes with the worker, however that ends
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as started:
            started.callback(os.close, lock)  # the worker has it
            on_failure.callback(clear, [self.scratch])
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            with theirs:
                self.process = self._start([theirs.fileno(), lock], withheld)
            on_failure.pop_all()
        self.channel = Channel(ours)
        self.owed: deque[Job] = deque()
        self.loaded = False  # has it loaded the environment's class?
        self._untouched: deque[int] = deque()  # numbers of jobs in the messages that it has not taken up
        self._taken_up = 0  # jobs that are left of the message it has taken up
        self._heard = 0  # bytes of an unfinished answer when they were last a sign of life
        self.ended: list[int] = []  # episodes it is to be told of with the next jobs
        self.leaving = False  # does it only play what it has?
        self.outgrown = ""  # why its episodes have to move elsewhere
        self.resets, self.looked_at = 0, 0  # and how many of them when its memory was looked at
        self.hung_up: float | None = None  # when it closed the channel
        self._ending: threading.Thread | None = None
        self.load_limit = load_limit
        self.deadline = time.monotonic() + load_limit
        self.channel.send(setup)

    def _start(self, descriptors: Sequence[int], withheld: Sequence[str]) -> subprocess.Popen:
        if os.name == "nt":
            raise OSError("environments run in POSIX process groups, which Windows does not have: use WSL")
        path = json.dumps([folder or os.getcwd() for folder in sys.path])
        variables = {name: value for name, value in os.environ.items() if name not in withheld}
        # -P: modules come from where the trainer takes them, not from a copy in the current folder.
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, path, *map(str, descriptors), self.scratch],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,  # input() raises instead of reading the trainer's terminal
                env={**variables, "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch},
                process_group=0,  # what an environment starts ends with its worker
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"no environment worker can be started with {sys.executable!r} ({error}): use fewer workers "
                "(num_environment_workers), or raise the limits of files and processes (ulimit -n, ulimit -u)",
            ) from error

    def send(self, jobs: Sequence[Job]) -> None:
        jobs_sent = [(job.number, job.episode, job.command, job.argument, job.expected) for job in jobs]
        message = pickled((self.ended, jobs_sent))
        self.ended = []
        idle = not self.owed
        self.owed += jobs
        self._untouched.append(len(jobs))
        self.resets += sum(job.command == "reset" for job in jobs)
        if idle and self.loaded:
            self._start_next()
        self.channel.send(message)

    def flush(self) -> None:
        """Send more of what it did not take at once."""
        moved = self.channel.moved
        self.channel.flush()
        if self.channel.moved > moved and self.loaded and not self.begun:
            self._start_next()

    def receive(self) -> list[bytes]:
        """What it says.

        Raises:
            EOFError: it has ended.
        """
        messages = self.channel.receive()
        unfinished = self.channel.unfinished
        if messages or unfinished < self._heard:
            self._heard = 0
        if unfinished >= self._heard + (PIECE if self._heard else 1):  # a long answer; not one that comes in drops
            self._heard = unfinished
            self._start_next()
        return messages

    def take(self, message: bytes) -> tuple[Job, Answer] | None:
        """A job and its answer; `None` when a message says that it has loaded the environment, or else that it begins
        with the jobs of the next message.

        Raises:
            NoAnswerError: when it makes no sense now. What else the worker says is then worth nothing.
        """
        told = None
        if message:
            answer = decode(message)
            if not self.begun or answer.job != self.owed[0].number:
                raise NoAnswerError("an answer that nobody is owed")
            told = self.owed.popleft(), answer
            self._taken_up -= 1
        elif self.loaded:
            if self.begun or not self._untouched:
                raise NoAnswerError("it takes up jobs that it was not given")
            self._taken_up = self._untouched.popleft()
        self.loaded = True
        self._start_next()
        return told

    @property
    def begun(self) -> bool:
        """Has it begun with the next job? Until then none can have killed it."""
        return self._taken_up > 0

    def _start_next(self) -> None:
        """Its next job has its time from now on."""
        if self.loaded and self.owed:
            self.deadline = time.monotonic() + self.owed[0].limit

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def memory(self) -> int:
        """Resident bytes of the process and of what it started; 0 when it has died."""
        try:
            process = psutil.Process(self.process.pid)
            return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    def end(self, patience: float = 0.0, wait: float = 0.1) -> int | None:
        """Close the channel, and kill the process unless it ends by itself in time, and whatever it started or left.

        What takes longer than `wait` seconds goes on in a thread: nobody waits for a process that takes its time.

        Returns:
            Its exit status, if it has one by now.
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process of the group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may have left its group
        self.process.wait()

    @property
    def in_service(self) -> bool:
        return self._ending is None

    @property
    def gone(self) -> bool:
        return self._ending is not None and not self._ending.is_alive()


def end_all(workers: list[WorkerProcess], owner: int) -> None:
    """End all workers at the same time, unless this process is a fork of the one that plays with them.

    No thread is started: it may be the interpreter's end.
    """
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.channel.close()  # all learn it at the same time
    deadline = time.monotonic() + 2.0
    for worker in workers:
        patience = max(0.0, deadline - time.monotonic())
        if worker.in_service:
            worker._stop(patience)
        else:
            worker._ending.join(patience)
    clear([worker.scratch for worker in workers])
    workers.clear()


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no name
        return f"signal {-status}"


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
