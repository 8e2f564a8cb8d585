"""Environments in worker processes: many episodes in few processes, and no environment can end a run.

Each episode has a *slot*. If an environment raises, times out, crashes or returns an invalid result, an
`EnvironmentFailure` replaces its result. A lost worker is replaced, and its other episodes are replayed: the reset and
all actions, with every answer compared with the first one. Episodes with equal answers continue; the others are
`"lost"`.

There are no rounds: jobs are sent at once and answers collected as they arrive. A worker runs its jobs in order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from ...utils.errors import G2POError
from ...utils.masking import withheld_variables
from ...utils.options import require
from ..contract import Observation, StepResult, TextEnvironment
from ..several import environments_of
from ..validation import factory_name
from .answers import InvalidAnswerError
from .episode_log import EnvironmentFailure, Job, PooledEpisode
from .limits import PoolLimits
from .listener import listen
from .worker_process import WorkerFailure, WorkerProcess, end_all

Received = Observation | StepResult | EnvironmentFailure

MAX_LOST_WORKERS = 3  # per answer, by other jobs' time limits or before a job; then the episode is given up
MAX_LOST_RESETS = 2  # of equal tasks; then other episodes of the task are not tried until the pool is empty


class EnvironmentPool(contextlib.AbstractContextManager):
    """Pool of worker processes that play environments.

    Episodes are numbered by *slots*. `reset` and `step` wait for all answers. For streaming, `begin` opens episodes,
    `send` sends actions, and `receive` returns the answers that have arrived, independently of other episodes:

    ```py
    pool.begin(tasks)
    while answers := pool.receive(timeout=None):
        pool.send({slot: act(seen) for slot, seen in answers.items() if is_running(seen)})
    ```

    Use it as a context manager, or call `close`; and from one thread at a time. `replayed` is the number of episodes
    that continued after a replay, `recycled` the number of workers replaced for their resets or memory.
    `environment_names` has the names of the environments if a task chooses one of several.

    Args:
        environment_factory: constructs an environment. Pickled by cloudpickle; classes of scripts and notebooks work.
        limits: number and limits of workers, or a configuration with them; by default `PoolLimits()`.
        **options: fields of `PoolLimits`, instead of those in `limits`.

    Raises:
        G2POError: if the factory cannot be pickled, or a variable is not set.
    """

    def __init__(
        self, environment_factory: Callable[[], TextEnvironment], limits: PoolLimits | None = None, **options: Any
    ):
        self.limits = limits = PoolLimits.of(limits, **options)
        self.withheld = withheld_variables(limits.environment_variables or ())  # which workers do not get
        self.name = factory_name(environment_factory)
        self.num_workers = limits.workers
        self.environment_names = tuple(environments_of(environment_factory))
        try:
            self._setup = cloudpickle.dumps((environment_factory, limits))
        except Exception as error:
            remedy = "pass a class, a function or a functools.partial with plain data"
            message = f"environment_factory {self.name} cannot be sent to worker processes ({error}): {remedy}"
            raise G2POError(message, "environment_factory", environment_factory) from error
        self.episodes: dict[int, PooledEpisode] = {}  # running, by slot
        self.pending: set[int] = set()  # slots with a pending answer
        self.replayed = self.recycled = 0
        self._answers: dict[int, Received] = {}  # not collected yet, in order of arrival
        self._workers: list[WorkerProcess | None] = [None] * self.num_workers  # accept new episodes
        self._processes: list[WorkerProcess] = []  # also those that are being replaced or ended
        self._lost_resets: dict[Any, list[WorkerFailure]] = defaultdict(list)  # by group and pickled task
        self._numbers = itertools.count()
        self._close = weakref.finalize(self, end_all, self._processes, os.getpid())

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.process.pid for worker in self._in_service]

    @property
    def _in_service(self) -> list[WorkerProcess]:
        return [worker for worker in self._processes if worker.in_service]

    def describe(self, episodes: int) -> str:
        """Return a line about the workers. `episodes`: number of concurrent episodes."""
        memory = max(worker.memory() for worker in self._in_service) / 2**20
        each = f"{self.num_workers} worker processes per rank, {memory:.0f} MB each after one episode"
        return f"Environments: {self.name} in {each}, {episodes} episodes at a time"

    def reset(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None = None
    ) -> list[Observation | EnvironmentFailure]:
        """End all episodes, `begin` one per task (the i-th in slot i), and return first observations or failures."""
        self.end()
        return list(self.collect(self.begin(tasks, groups)).values())

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EnvironmentFailure]:
        """Play one action in each of the given slots, in parallel, and return all results. Raises as `send`."""
        self.send(actions)
        return self.collect(list(actions))

    def begin(self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None = None) -> list[int]:
        """Open an episode per task in addition to running ones, without waiting; return their slots, the lowest free.

        `receive` returns their first observations. A slot is free once its episode's last answer was received.

        Args:
            tasks: keyword arguments of `reset`, one mapping per episode. After two resets of a task ended their
                workers, its other episodes fail until no episode runs.
            groups: group of each episode. Members share a worker if all workers are busy then.

        Raises:
            G2POError: if the numbers of tasks and groups differ, or a task cannot be pickled.
        """
        self._check_open()
        groups = [None] * len(tasks) if groups is None else list(groups)
        require(len(groups) == len(tasks), "groups", groups, f"give one group for each of {len(tasks)} tasks")
        try:
            arguments = [pickle.dumps(dict(task)) for task in tasks]
        except Exception as error:
            message = f"tasks cannot be sent to worker processes ({error}): keep plain data in the dataset"
            raise G2POError(message, "tasks", tasks) from error
        with self._ending_all_on_error():
            if not self.episodes:
                self._lost_resets.clear()
            self._replace_workers()
            free = (slot for slot in itertools.count() if slot not in self.episodes and slot not in self._answers)
            new = [
                PooledEpisode(next(self._numbers), slot, group, dict(task), [argument])
                for slot, group, task, argument in zip(free, groups, tasks, arguments)
            ]
            slots = [episode.slot for episode in new]
            self.episodes |= zip(slots, new)
            self.pending |= {*slots}
            self._submit(new)
        return slots

    def send(self, actions: Mapping[int, str]) -> None:
        """Send actions, by slot, to running episodes, without waiting. `receive` returns the results.

        Raises:
            G2POError: if a slot has no running episode, or its answer is pending. Nothing is sent then.
        """
        self._check_open()
        for slot in actions:
            is_ready = slot in self.episodes and not self._awaits(slot)
            remedy = "receive its answer before the next action; or its episode has ended, failed, or was never reset"
            require(is_ready, f"slot {slot}", "not waiting for an action", remedy)
        with self._ending_all_on_error():
            for slot, action in actions.items():
                self.episodes[slot].arguments.append(action)
            self.pending |= actions.keys()
            self._submit([self.episodes[slot] for slot in actions])

    def receive(self, timeout: float | None = 0.0) -> dict[int, Received]:
        """Return all answers that have arrived, by slot: first observations, results and failures.

        It waits `timeout` seconds for the first one (`None`: while one is pending). Time limits run continuously, but
        are enforced only here: call it about every second. An exception such as Ctrl-C in the call ends all episodes.
        """
        self._wait(timeout)
        answers, self._answers = self._answers, {}
        return answers

    def collect(self, slots: Sequence[int]) -> dict[int, Received]:
        """Wait for the answers of these slots and return them in this order; other answers stay.

        Raises:
            G2POError: if a slot has no pending answer.
        """
        for slot in slots:
            require(self._awaits(slot), f"slot {slot}", "no pending answer", "send an action first")
        self._wait(None, slots)
        return {slot: self._answers.pop(slot) for slot in slots}

    def seconds(self, slot: int) -> float:
        """Return the seconds that the environment has worked on a running episode, without replays."""
        return self.episodes[slot].seconds

    def end(self, slots: Iterable[int] | None = None) -> None:
        """End episodes early, free their slots and drop their answers. `slots=None`: all episodes."""
        workers = set()
        for slot in [*self.episodes, *self._answers] if slots is None else slots:
            self._answers.pop(slot, None)
            self.pending.discard(slot)
            episode = self.episodes.pop(slot, None)
            if episode is not None and episode.worker is not None:
                episode.worker.ended_episodes.append(episode.number)
                workers.add(episode.worker)
        for worker in workers & {*self._in_service}:
            worker.send([])  # the next jobs may come after an update only
        self._end_drained_workers()

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards."""
        self._close()

    def __exit__(self, *exception) -> None:
        self.close()

    def _check_open(self) -> None:
        require(self._close.alive, "EnvironmentPool", "closed", "make another one")

    def _awaits(self, slot: int) -> bool:
        return slot in self.pending or slot in self._answers

    def _submit(self, episodes: Iterable[PooledEpisode]) -> None:
        """Send the pending job of each episode, or all its jobs to a new worker; fail those that are not tried."""
        for episode in episodes:
            lost = self._lost_resets.get((episode.group, episode.arguments[0]), ())
            if len(lost) >= MAX_LOST_RESETS and not episode.digests:
                message = f"not tried, since resets of this task failed before: {lost[-1].message}"
                self._deliver(episode, episode.failure(lost[-1].kind, message))
        episodes = [episode for episode in episodes if self._is_pending(episode)]
        unassigned = [episode for episode in episodes if episode.worker is None]
        live = Counter(episode.worker for episode in self.episodes.values())
        load = [live[worker] if worker else 0 for worker in self._workers]
        homes = place_groups([episode.group for episode in unassigned], load)
        for index in sorted({*homes}):
            if self._workers[index] is None:  # all start before the first job is sent, in parallel
                self._processes[:] = [worker for worker in self._processes if not worker.has_ended]
                self._workers[index] = WorkerProcess(self._setup, self.withheld, self.limits)
                self._processes.append(self._workers[index])
        jobs: dict[WorkerProcess, list[Job]] = defaultdict(list)
        for episode in episodes:
            first = 0 if episode.worker is None else len(episode.digests)
            episode.worker = episode.worker or self._workers[homes.pop(0)]
            jobs[episode.worker] += episode.jobs(first)
        for worker, of_worker in jobs.items():
            worker.send(of_worker)

    def _wait(self, timeout: float | None, slots: Sequence[int] | None = None) -> None:
        """Wait up to `timeout` seconds while answers are pending, until any, or all of `slots`, are there."""
        self._check_open()
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with self._ending_all_on_error():
            patience = 0.0
            while True:
                self._listen(patience)
                done = bool(self._answers) if slots is None else all(slot in self._answers for slot in slots)
                patience = until - time.monotonic()
                if done or not self.pending or patience <= 0:
                    return

    def _listen(self, patience: float) -> None:
        for worker, messages, failure_kind in listen(self._in_service, patience):
            why = ""
            try:
                for message in messages:
                    self._on_message(worker, message)
            except InvalidAnswerError as error:
                failure_kind, why = "crash", f"sent an invalid message ({error})"
            if failure_kind:
                self._on_worker_failure(worker, failure_kind, why)
        self._end_drained_workers()

    def _on_message(self, worker: WorkerProcess, message: bytes) -> None:
        """Deliver the answer in a message, if there is one. Raises `InvalidAnswerError` for an unexpected message."""
        delivered = worker.handle(message)
        if delivered is None:
            return
        job, answer = delivered
        episode = job.episode
        if not self._is_pending(episode):  # it has ended or failed
            return
        result, wanted = answer.result, StepResult if job.command == "step" else Observation
        if isinstance(result, tuple):
            kind, text = result
            hidden = [name for name in self.withheld if re.search(rf"\b{re.escape(name)}\b", text)]
            if hidden:
                text += f"\nworkers do not get {', '.join(hidden)}: name it in environment_variables"
            self._deliver(episode, episode.failure(kind, text, in_replay=job.expected is not None))
        elif not job.expected and isinstance(result, wanted) and answer.digest is not None:
            self.replayed += episode.record(answer.digest, answer.seconds)
            self._deliver(episode, result)
        elif not job.expected:
            self._deliver(episode, episode.failure("invalid", f"the worker sent no answer to {job.command}"))

    def _is_pending(self, episode: PooledEpisode) -> bool:
        return episode.slot in self.pending and self.episodes[episode.slot] is episode

    def _deliver(self, episode: PooledEpisode, answer: Received) -> None:
        self.pending.discard(episode.slot)
        self._answers[episode.slot] = answer
        failed = isinstance(answer, EnvironmentFailure)
        if failed or (isinstance(answer, StepResult) and (answer.terminated or answer.truncated)):
            del self.episodes[episode.slot]
            if failed and episode.worker is not None:
                episode.worker.ended_episodes.append(episode.number)

    def _on_worker_failure(self, worker: WorkerProcess, failure_kind: str, why: str) -> None:
        """End a failed worker, fail the episode of its running job, and reassign its other episodes.

        Episodes with a pending answer are replayed now, other episodes at their next action.
        """
        failure = worker.fail(failure_kind, self.name, why)
        self._workers = [None if other is worker else other for other in self._workers]
        job, jobs = failure.job, dict.fromkeys(job.episode for job in worker.pending_jobs)
        waiting = [episode for episode in jobs if self._is_pending(episode)]
        for episode in self.episodes.values():
            if episode.worker is worker:
                episode.worker, episode.loss = None, failure.message
        if job and job.episode in waiting:
            waiting.remove(job.episode)
            if job.command == "reset" and not job.expected:
                self._lost_resets[job.episode.group, job.argument].append(failure)
            self._deliver(job.episode, job.episode.failure(failure.kind, failure.message, job.expected is not None))
        for episode in waiting:
            episode.lost_workers += failure.kind == "timeout" or job is None
            is_stuck = failure.kind == "timeout" and job is None  # so would be the next worker
            if is_stuck or episode.lost_workers >= MAX_LOST_WORKERS:
                in_replay = job is None and bool(episode.digests)
                self._deliver(episode, episode.failure(failure.kind, f"given up: {failure.message}", in_replay))
        self._submit([episode for episode in waiting if self._is_pending(episode)])

    @contextlib.contextmanager
    def _ending_all_on_error(self) -> Iterator[None]:
        """On any exception, end all episodes, so that late answers are not mistaken for new ones."""
        try:
            yield
        except BaseException:
            self.end()
            for worker in [worker for worker in self._in_service if worker.pending_jobs]:
                self._workers = [None if other is worker else other for other in self._workers]
                worker.end()
            raise

    def _replace_workers(self) -> None:
        """Replace workers over their limits of resets or memory; they play their episodes on, or these move."""
        for index, worker in enumerate(self._workers):
            if worker is not None and worker.must_be_replaced():
                self._workers[index], worker.draining = None, True
                self.recycled += 1
        self._end_drained_workers()

    def _end_drained_workers(self) -> None:
        """Move the episodes of draining workers over their memory limit, and end draining workers without episodes."""
        for worker in [worker for worker in self._in_service if worker.draining]:
            episodes = [episode for episode in self.episodes.values() if episode.worker is worker]
            for episode in episodes:
                if worker.over_memory and episode.slot not in self.pending:
                    episode.worker, episode.loss = None, worker.over_memory
            if not worker.pending_jobs and all(episode.worker is not worker for episode in episodes):
                worker.end(patience=2.0, wait=0.0)


def least_busy(load: Sequence[int], number: int) -> list[int]:
    """Return workers for `number` episodes, each the least busy at its turn. `load`: running episodes of each."""
    load, homes = list(load), []
    for _ in range(number):
        homes.append(load.index(min(load)))
        load[homes[-1]] += 1
    return homes


def place_groups(groups: Sequence[Hashable], load: Sequence[int]) -> list[int]:
    """Return the worker of each episode: groups in order, cut into parts.

    Idle workers cut at most `len(load) - 1` groups.
    """
    order = sorted(range(len(groups)), key=lambda index: groups.index(groups[index]))
    homes = dict(zip(order, sorted(least_busy(load, len(groups)))))
    return [homes[index] for index in range(len(groups))]
