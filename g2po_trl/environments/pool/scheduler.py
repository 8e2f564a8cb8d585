"""Schedule the episodes of a pool on its workers, and replay the episodes of a lost worker in another one.

There are no rounds: jobs are sent at once and answers collected as they arrive. A worker runs its jobs in order, so
the time of an answer depends only on earlier jobs of the same worker. Lost workers are counted per episode.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..contract import Observation, StepResult
from .answers import Answer, InvalidAnswerError
from .episode_log import EnvironmentFailure, PooledEpisode
from .fault_policy import FailedResets, WorkerFailure, end_failed_worker, is_old, too_big, why_give_up
from .limits import PoolLimits
from .listener import Listener
from .placement import least_busy, place_groups
from .worker_process import Job, WorkerProcess, end_all

Received = Observation | StepResult | EnvironmentFailure


class WorkerScheduler:
    """Scheduler of running episodes on worker processes, which get `setup`, the pickled factory and its limits."""

    def __init__(self, setup: bytes, withheld: Sequence[str], limits: PoolLimits, name: str):
        self.setup, self.withheld, self.limits, self.name = setup, withheld, limits, name
        self.workers: list[WorkerProcess | None] = [None] * limits.workers  # accept new episodes
        self.episodes: dict[int, PooledEpisode] = {}  # running, by slot
        self.pending: set[int] = set()  # slots with a pending answer
        self.answers: dict[int, Received] = {}  # not collected yet, in order of arrival
        self.replayed = 0  # episodes that continued after a replay
        self.recycled = 0  # workers replaced for their resets or memory
        self.in_service: list[WorkerProcess] = []  # including draining workers
        self._processes: list[WorkerProcess] = []  # including workers that are being ended
        self._listener = Listener()
        self._failed_resets = FailedResets()
        self._numbers = itertools.count()
        self.close = weakref.finalize(self, _close, self._processes, self._listener, os.getpid())

    def begin(
        self,
        tasks: Sequence[tuple[Mapping[str, Any], bytes]],
        groups: Sequence[Hashable],
        retry_groups: Sequence[Hashable],
    ) -> list[int]:
        """Open an episode per task, given with its pickle, and return their slots, the first free ones."""
        with self._dropping_pending_on_error():
            if not self.episodes:
                self._failed_resets.clear()
            self._replace_workers()
            homes = place_groups(groups, self._load())
            free = (slot for slot in itertools.count() if slot not in self.episodes and slot not in self.answers)
            episodes = [
                PooledEpisode(next(self._numbers), slot, *task, retry_group)
                for slot, task, retry_group in zip(free, tasks, retry_groups)
            ]
            self.episodes |= {episode.slot: episode for episode in episodes}
            self.pending |= {episode.slot for episode in episodes}
            self._submit(
                self._without_failing_tasks(episodes), dict(zip((episode.slot for episode in episodes), homes))
            )
            return [episode.slot for episode in episodes]

    def send(self, actions: Mapping[int, str]) -> None:
        with self._dropping_pending_on_error():
            for slot, action in actions.items():
                self.episodes[slot].action = action
            self.pending |= actions.keys()
            self._submit([self.episodes[slot] for slot in actions])

    def end(self, slots: Iterable[int]) -> None:
        workers = set()
        for slot in slots:
            self.answers.pop(slot, None)
            self.pending.discard(slot)
            episode = self.episodes.pop(slot, None)
            if episode is not None and episode.worker is not None:
                episode.worker.ended_episodes.append(episode.number)
                workers.add(episode.worker)
        for worker in workers & {*self.in_service}:
            worker.send_ended()
            self._listener.sent(worker)
        self._end_drained_workers()

    def _submit(self, episodes: Sequence[PooledEpisode], homes: Mapping[int, int] | None = None) -> None:
        """Send pending jobs of episodes. One without a worker gets `homes[slot]`, by default the least busy worker."""
        unassigned = [episode for episode in episodes if episode.worker is None]
        if unassigned and homes is None:
            homes = dict(zip((episode.slot for episode in unassigned), least_busy(self._load(), len(unassigned))))
        for index in sorted({homes[episode.slot] for episode in unassigned}):
            if self.workers[index] is None:  # all start before the first job is sent, in parallel
                self.workers[index] = self._start()
        jobs: dict[WorkerProcess, list[Job]] = defaultdict(list)
        for episode in episodes:
            if episode.worker is None:
                episode.worker = self.workers[homes[episode.slot]]
                jobs[episode.worker] += episode.replay_jobs(self.limits)
            if episode.action is not None:
                jobs[episode.worker].append(episode.step(episode.action, self.limits))
        for worker, of_worker in jobs.items():
            worker.send(of_worker)
            self._listener.sent(worker)

    def _start(self) -> WorkerProcess:
        self._processes[:] = [worker for worker in self._processes if not worker.has_ended]
        worker = WorkerProcess(self.setup, self.withheld, self.limits.load_timeout)
        self._processes.append(worker)
        self.in_service.append(worker)
        self._listener.add(worker)
        return worker

    def _load(self) -> list[int]:
        load = Counter(episode.worker for episode in self.episodes.values())
        return [load[worker] if worker is not None else 0 for worker in self.workers]

    def wait(self, timeout: float | None, slots: Sequence[int] | None = None) -> None:
        """Wait up to `timeout` seconds while answers are pending, until any, or all of `slots`, are there."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with self._dropping_pending_on_error():
            patience = 0.0
            while True:
                self._listen(patience)
                done = bool(self.answers) if slots is None else all(slot in self.answers for slot in slots)
                patience = until - time.monotonic()
                if done or not self.pending or patience <= 0:
                    return

    def collect(self, slots: Sequence[int] | None = None) -> dict[int, Received]:
        """Remove and return all answers, or the answers of the given slots."""
        if slots is None:
            answers = dict(self.answers)
            self.answers.clear()
            return answers
        return {slot: self.answers.pop(slot) for slot in slots}

    def _listen(self, patience: float) -> None:
        for worker, messages, failure_kind in self._listener.listen(self.in_service, patience):
            why = "a message above the maximum size"
            try:
                for message in messages:
                    self._on_message(worker, message)
            except InvalidAnswerError as error:
                failure_kind, why = "corrupt", str(error)
            if failure_kind:
                self._on_worker_failure(worker, failure_kind, why)
            elif worker.draining:
                self._end_drained_workers()

    def _on_message(self, worker: WorkerProcess, message: bytes) -> None:
        """Deliver the answer in a message, if there is one. Raises `InvalidAnswerError` for an unexpected message."""
        delivered = worker.handle(message)
        if delivered is None:
            return
        job, answer = delivered
        episode = self._pending_episode(job)
        if episode is None:  # the episode has ended or failed
            return
        result = answer.result
        if not job.expected and not _answers(job, answer):
            result = "invalid", f"the worker sent no answer to {job.command}"
        if isinstance(result, tuple):
            kind, text = result
            hidden = [name for name in self.withheld if name in text]
            if hidden:
                text += f"\nworkers do not get {', '.join(hidden)}: name it in environment_variables"
            self._deliver(episode, episode.replay_failure(text) if job.expected else episode.failure(kind, text))
        elif not job.expected:
            self.replayed += episode.record(job, answer.digest)
            self._deliver(episode, result)

    def _pending_episode(self, job: Job | None) -> PooledEpisode | None:
        """Return the running episode of a job if its answer is pending."""
        episode = self.episodes.get(job.slot) if job else None
        return episode if episode and episode.number == job.episode and job.slot in self.pending else None

    def _deliver(self, episode: PooledEpisode, answer: Received) -> None:
        self.pending.discard(episode.slot)
        self.answers[episode.slot] = answer
        failed = isinstance(answer, EnvironmentFailure)
        if failed or (isinstance(answer, StepResult) and (answer.terminated or answer.truncated)):
            del self.episodes[episode.slot]
            if failed and episode.worker is not None:
                episode.worker.ended_episodes.append(episode.number)
        elif episode.worker.over_memory:
            episode.reassign(episode.worker.over_memory)

    def _on_worker_failure(self, worker: WorkerProcess, failure_kind: str, why: str) -> None:
        """End a failed worker, fail the episode of its running job, and reassign its other episodes.

        Episodes with a pending answer are replayed now, other episodes at their next action.
        """
        self._retire(worker)
        failure = end_failed_worker(worker, failure_kind, self.name, why)
        blamed = self._pending_episode(failure.job)
        pending = {episode.slot: episode for job in worker.pending_jobs if (episode := self._pending_episode(job))}
        for episode in self.episodes.values():
            if episode.worker is worker:
                episode.reassign(failure.message)
        if blamed:
            del pending[blamed.slot]
            if failure.job.command == "reset" and failure.job.expected is None:
                self._failed_resets.add(blamed, failure)
            self._fail(blamed, failure, in_replay=failure.job.expected is not None)
        waiting = []
        for episode in self._without_failing_tasks(pending.values()):
            why = why_give_up(episode, failure)
            if why is None:
                waiting.append(episode)
            else:
                self._fail(episode, failure, why, in_replay=not why and bool(episode.digests))
        self._submit(waiting)

    def _without_failing_tasks(self, episodes: Iterable[PooledEpisode]) -> list[PooledEpisode]:
        """Return the episodes to try; fail new episodes of tasks whose resets ended too many workers."""
        accepted = []
        for episode in episodes:
            failure = self._failed_resets.last_failure(episode)
            if failure is None:
                accepted.append(episode)
            else:
                self._fail(episode, failure, "not tried, since resets of this task failed before: ")
        return accepted

    def _fail(self, episode: PooledEpisode, failure: WorkerFailure, why: str = "", in_replay: bool = False) -> None:
        """Deliver the failure of an episode. `in_replay`: it happened while the episode was replayed."""
        if in_replay:
            self._deliver(episode, episode.replay_failure(failure.message))
        else:
            self._deliver(episode, episode.failure(failure.kind, why + failure.message))

    @contextmanager
    def _dropping_pending_on_error(self) -> Iterator[None]:
        """On any exception, drop pending requests so that late answers are not mistaken for new ones."""
        try:
            yield
        except BaseException:
            self.end([*self.episodes, *self.answers])
            busy = [worker for worker in self.in_service if worker.pending_jobs]
            for worker in busy:
                self._retire(worker)
                worker.end(wait=0.0)
            for worker in busy:
                worker.end()
            raise

    def _replace_workers(self) -> None:
        """Replace workers over their limits of resets or memory."""
        live = Counter(episode.worker for episode in self.episodes.values())
        draining = sum(worker.draining for worker in self.in_service)
        for index, worker in enumerate(self.workers):
            if worker is None:
                continue
            worker.over_memory = too_big(self.limits, worker, live[worker])
            if not worker.over_memory and not is_old(self.limits, worker, live[worker], draining):
                continue
            self.workers[index], worker.draining = None, True
            self.recycled += 1
            draining += live[worker] > 0
            for episode in self.episodes.values():
                if worker.over_memory and episode.worker is worker and episode.slot not in self.pending:
                    episode.reassign(worker.over_memory)
        self._end_drained_workers()

    def _end_drained_workers(self) -> None:
        """End draining workers without running episodes."""
        draining = [worker for worker in self.in_service if worker.draining and not worker.pending_jobs]
        if draining:
            live = {episode.worker for episode in self.episodes.values()}
            for worker in draining:
                if worker not in live:
                    self._retire(worker)
                    worker.end(patience=2.0, wait=0.0)

    def _retire(self, worker: WorkerProcess) -> None:
        self._listener.remove(worker)
        self.in_service = [other for other in self.in_service if other is not worker]
        self.workers = [None if other is worker else other for other in self.workers]


def _answers(job: Job, answer: Answer) -> bool:
    """Return whether an answer has the type that its job requires."""
    wanted = StepResult if job.command == "step" else Observation
    return isinstance(answer.result, tuple) or (isinstance(answer.result, wanted) and answer.digest is not None)


def _close(processes: list[WorkerProcess], listener: Listener, owner: int) -> None:
    if os.getpid() == owner:
        listener.close()
    end_all(processes, owner)
