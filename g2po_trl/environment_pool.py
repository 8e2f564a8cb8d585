"""Environments in worker processes: many episodes in few processes, and no environment can end a run.

An episode has a *slot*, from one `reset` of the pool to the next. Members of a group live in the same worker, so what
a game costs to prepare is paid once. Whatever an environment does wrong comes back as an `EnvironmentFailure` in place
of its result: raise, hang (its worker is killed), die, or return nonsense. A worker that is lost takes the episodes it
hosted with it and is replaced at the next `reset`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import dill
import psutil

from .environment import Observation, StepResult, TextEnvironment
from .environment_check import EnvironmentContractError, factory_name


@dataclass(frozen=True)
class EnvironmentFailure:
    """What came instead of an observation.

    Args:
        kind: `"exception"` (raised), `"timeout"` (hung), `"crash"` (its process died), `"invalid"` (broke its
            contract).
        message: what happened where, with the worker's traceback if there is one.
    """

    kind: str
    message: str


class _Worker:
    """One process, its pipe, and the slots it still owes an answer for, in the order it works on them."""

    def __init__(self, setup: bytes):
        self.connection, child = Pipe()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # -P: modules come from where the trainer takes them, not from a copy in the current folder.
        self.scratch = tempfile.mkdtemp(prefix="g2po-worker-")  # goes with the worker, however that ends
        command = [sys.executable, "-P", "-m", "g2po_trl.environment_worker", str(child.fileno()), self.scratch]
        self.process = subprocess.Popen(
            command,
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,  # input() raises instead of reading the trainer's terminal
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch},
            process_group=0,  # what an environment starts ends with its worker
        )
        child.close()
        self.owed: deque[int] = deque()
        self.deadline = 0.0
        self.resets = 0
        with contextlib.suppress(OSError):  # died at once: the first answer that does not come will tell
            self.connection.send_bytes(setup)

    def send(self, message: bytes, slots: list[int], timeout: float) -> None:
        self.owed = deque(slots)
        self.deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def memory(self) -> int:
        """Resident bytes of the process and of what it started; 0 when it has died."""
        try:
            process = psutil.Process(self.process.pid)
            return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    def end(self, patience: float = 0.0) -> int:
        """Close the pipe, and kill the process unless it ends by itself in time, and whatever it started or left.

        Returns:
            Its exit status.
        """
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, patience))
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process of the group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)
        return status


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_all(workers: list[_Worker | None], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the trainer, which still plays with them
        return
    for worker in workers:
        if worker is not None:
            worker.connection.close()  # all learn it at the same time
    deadline = time.monotonic() + 2.0
    for worker in workers:
        if worker is not None:
            worker.end(patience=deadline - time.monotonic())
    workers.clear()


def _shortened(text: str, limit: int) -> str:
    """The text without its middle when it is long: the end of a traceback says most."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no name
        return f"signal {-status}"


def _is_over(result: Observation | StepResult | EnvironmentFailure | None) -> bool:
    """Did the episode end with this answer?"""
    return isinstance(result, EnvironmentFailure) or (
        isinstance(result, StepResult) and (result.terminated or result.truncated)
    )


def _message(command: str, jobs: list[tuple[int, Any]]) -> bytes:
    try:
        return pickle.dumps((command, jobs))
    except Exception as error:
        raise ValueError(
            f"tasks or actions cannot be sent to worker processes ({error}): keep plain data in the dataset"
        ) from error


class EnvironmentPool:
    """Plays environments in worker processes.

    Args:
        environment_factory: makes an environment. Pickled with dill: a class of a script or a notebook will do.
        num_workers: processes; `None`: as many as cores this process may use.
        reset_timeout, step_timeout: seconds one episode's reset or step may take.
        max_observation_characters: longer observations are an `"invalid"` failure.
        episode_timeout: seconds reset and steps of one episode may take together; `None`: no limit.
        max_worker_resets, max_worker_memory: a worker that has reset as many episodes, or holds as many bytes, is
            replaced before the next reset: environments leak. `None`: never.

    Raises:
        ValueError: when the factory cannot be pickled, or a number is out of range.
    """

    def __init__(
        self,
        environment_factory: Callable[[], TextEnvironment],
        num_workers: int | None = None,
        reset_timeout: float = 120.0,
        step_timeout: float = 60.0,
        max_observation_characters: int | None = 1_000_000,
        episode_timeout: float | None = None,
        max_worker_resets: int | None = None,
        max_worker_memory: float | None = None,
    ):
        num_workers = _usable_cores() if num_workers is None else num_workers
        for name, value in (
            ("num_workers", num_workers),
            ("reset_timeout", reset_timeout),
            ("step_timeout", step_timeout),
            ("episode_timeout", episode_timeout),
            ("max_worker_resets", max_worker_resets),
            ("max_worker_memory", max_worker_memory),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: set it above 0")
        try:
            self._setup = dill.dumps((environment_factory, max_observation_characters, episode_timeout), recurse=True)
        except Exception as error:
            raise ValueError(
                f"environment_factory {factory_name(environment_factory)} cannot be sent to worker processes "
                f"({error}): pass a class, a function or a functools.partial that makes it from plain data"
            ) from error
        self.name = factory_name(environment_factory)
        self.reset_timeout, self.step_timeout = reset_timeout, step_timeout
        self.max_worker_resets, self.max_worker_memory = max_worker_resets, max_worker_memory
        self.recycled = 0  # workers replaced for their age or size
        self._workers: list[_Worker | None] = [None] * num_workers
        self._home: dict[int, int] = {}  # live slot -> worker
        self._fallen: dict[int, EnvironmentFailure] = {}  # lost with its worker while others were stepped
        self._tasks: list[dict[str, Any]] = []
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def worker_pids(self) -> list[int]:
        """Processes that are running now."""
        return [worker.process.pid for worker in self._workers if worker is not None]

    def reset(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[int] | None = None
    ) -> list[Observation | EnvironmentFailure]:
        """Open an episode of each task; episode i is slot i until the next reset, which ends all of them.

        Args:
            groups: group of each episode; its members share a worker. `None`: no groups.

        Raises:
            ValueError: when the numbers of tasks and groups differ, or a task cannot be pickled.
        """
        self._check_open()
        groups = list(range(len(tasks))) if groups is None else list(groups)
        if len(groups) != len(tasks):
            raise ValueError(f"{len(tasks)} tasks and {len(groups)} groups: give one group for each task")
        load = [0] * self.num_workers
        worker_of_group: dict[int, int] = {}
        for group, size in Counter(groups).items():  # in order of appearance: no chance in it
            worker_of_group[group] = load.index(min(load))
            load[worker_of_group[group]] += size
        todo = {slot: worker_of_group[group] for slot, group in enumerate(groups)}
        self._home, self._tasks, self._fallen = dict(todo), [dict(task) for task in tasks], {}
        self._recycle()
        results: dict[int, Observation | EnvironmentFailure] = {}
        while todo:
            jobs: dict[int, list] = {}
            for slot, worker in todo.items():
                jobs.setdefault(worker, []).append((slot, self._tasks[slot]))
            answers, lost = self._run("reset", jobs, self.reset_timeout)
            results.update(answers)
            # A worker lost while it reset an episode takes the others with it: they can start anew elsewhere.
            todo = {
                slot: worker for slot, worker in self._home.items() if worker in lost and slot not in lost.values()
            }
            for slot in lost.values():
                self._home.pop(slot, None)
        self._forget_ended(results)
        return [results[slot] for slot in range(len(tasks))]

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EnvironmentFailure]:
        """Play one action in each of the given live slots; workers work at the same time.

        Raises:
            ValueError: for a slot that is not live.
        """
        self._check_open()
        jobs: dict[int, list] = {}
        fallen = {slot: self._fallen.pop(slot) for slot in actions if slot in self._fallen}
        for slot, action in actions.items():
            if slot in fallen:
                continue
            if slot not in self._home:
                raise ValueError(f"slot {slot} has no live episode: it ended, failed, or was never reset")
            jobs.setdefault(self._home[slot], []).append((slot, action))
        results, _ = self._run("step", jobs, self.step_timeout)
        self._forget_ended(results)
        self._fallen |= {slot: failure for slot, failure in results.items() if slot not in actions}
        return {slot: fallen[slot] if slot in fallen else results[slot] for slot in actions}

    def check(self, task: Mapping[str, Any]) -> None:
        """Reset one environment in a worker and play one step, to find a broken one before work is lost.

        Raises:
            EnvironmentContractError: with what the environment did.
        """
        (result,) = self.reset([task])
        if not isinstance(result, EnvironmentFailure):
            result = self.step({0: (result.admissible_actions or ["look"])[0]})[0]
        self._home.clear()
        if isinstance(result, EnvironmentFailure):
            raise EnvironmentContractError(f"{self.name} fails ({result.kind}): {result.message}")

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def memory(self) -> list[int]:
        """Bytes each running worker holds, with what it started."""
        return [worker.memory() for worker in self._workers if worker is not None]

    def _recycle(self) -> None:
        """Replace workers that are old or big. Called while no episode is live."""
        for index, worker in enumerate(self._workers):
            if worker is None:
                continue
            old = self.max_worker_resets is not None and worker.resets >= self.max_worker_resets
            big = self.max_worker_memory is not None and worker.memory() > self.max_worker_memory
            if old or big:
                self._workers[index] = None
                worker.end(patience=2.0)
                self.recycled += 1

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("this EnvironmentPool is closed")

    def _forget_ended(self, results: Mapping[int, Observation | StepResult | EnvironmentFailure]) -> None:
        for slot, result in results.items():
            if _is_over(result):
                self._home.pop(slot, None)

    def _run(self, command: str, jobs: Mapping[int, list], timeout: float) -> tuple[dict[int, Any], dict[int, int]]:
        """Send each worker its jobs and collect every answer.

        Returns:
            Answer by slot; and, for workers that were lost, the slot they were at. In `step` all live episodes of a
            lost worker are answered by its failure, in `reset` only the one it was at.
        """
        results: dict[int, Any] = {}
        lost: dict[int, int] = {}
        waiting: dict[Connection, int] = {}
        try:
            messages = {index: _message(command, worker_jobs) for index, worker_jobs in jobs.items()}
            for index in jobs:  # all start before the first, still busy with starting, is written to
                if self._workers[index] is None:
                    self._workers[index] = _Worker(self._setup)
                waiting[self._workers[index].connection] = index
            for index, message in messages.items():
                self._workers[index].resets += len(jobs[index]) if command == "reset" else 0
                self._workers[index].send(message, [slot for slot, _ in jobs[index]], timeout)
            self._collect(command, waiting, timeout, results, lost)
        except BaseException:  # Ctrl-C: what a worker still owes must not answer the next call
            self._home.clear()
            for index in waiting.values():
                worker, self._workers[index] = self._workers[index], None
                worker.end()
            raise
        return results, lost

    def _collect(
        self,
        command: str,
        waiting: dict[Connection, int],
        timeout: float,
        results: dict[int, Any],
        lost: dict[int, int],
    ) -> None:
        while waiting:
            patience = min(self._workers[index].deadline for index in waiting.values()) - time.monotonic()
            for connection in wait(list(waiting), min(max(0.0, patience), 1.0)):
                index = waiting[connection]
                worker = self._workers[index]
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    del waiting[connection]
                    lost[index] = self._lose(index, command, "crash", results)
                    continue
                slot = worker.owed.popleft()
                results[slot] = self._answer(slot, command, message)
                worker.deadline = time.monotonic() + timeout
                if not worker.owed:
                    del waiting[connection]
            for connection, index in list(waiting.items()):
                worker = self._workers[index]
                # A process that a dead worker forked can hold the pipe open: its end is seen here, within a second.
                dead, late = worker.process.poll() is not None, time.monotonic() > worker.deadline
                if (dead or late) and not connection.poll():
                    del waiting[connection]
                    lost[index] = self._lose(index, command, "crash" if dead else "timeout", results, timeout)

    def _answer(self, slot: int, command: str, message: bytes) -> Observation | StepResult | EnvironmentFailure:
        try:
            _, answer = pickle.loads(message)
        except Exception as error:  # a class that unpickles in the worker only
            return self._failure(
                slot, "invalid", f"what {self.name}.{command} returned cannot be unpickled: {error!r}"
            )
        return self._failure(slot, *answer) if isinstance(answer, tuple) else answer

    def _failure(self, slot: int, kind: str, message: str) -> EnvironmentFailure:
        task = _shortened(repr(self._tasks[slot]), 1_000)
        return EnvironmentFailure(kind, f"{_shortened(message, 8_000)}\nslot {slot}, task {task}")

    def _lose(self, index: int, command: str, kind: str, results: dict[int, Any], timeout: float = 0.0) -> int:
        """End a worker that hangs or died, and answer for it. Returns the slot it was at."""
        worker, self._workers[index] = self._workers[index], None
        culprit = worker.owed[0]
        if kind == "timeout":
            worker.end()
            what = f"{self.name}.{command} took more than {timeout:g} s in slot {culprit}; its worker was killed"
        else:
            how = _how_it_ended(worker.end(patience=1.0))
            what = f"the worker process of {self.name} died ({how}) during {command} of slot {culprit}"
        # An episode that ended in this very step is complete: what its worker does afterwards takes nothing from it.
        hosted = [s for s, home in self._home.items() if home == index and not _is_over(results.get(s))]
        for slot in [culprit] if command == "reset" else hosted:
            results[slot] = self._failure(slot, kind, what)
        return culprit
