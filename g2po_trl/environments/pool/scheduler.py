"""The episodes of a pool and the workers that play them: what is asked goes out at once, answers are taken as they
come, and what a lost worker played is played again in another.

There are no rounds. A worker does its jobs in the order in which they were sent; how long an answer takes depends on
the jobs before it in its own worker alone. Each episode has its own count of workers lost while it waits.
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
from .answers import Answer, NoAnswerError
from .episode_log import EnvironmentFailure, PooledEpisode
from .fault_policy import LostResets, WorkerFailure, WorkerLimits, end_lost, given_up
from .listener import Listener
from .placement import FIRST_RESET, RESET, MeasuredTimes, least_busy, place_episodes
from .scratch import sweep
from .worker_process import Job, WorkerProcess, end_all

Received = Observation | StepResult | EnvironmentFailure


class WorkerScheduler:
    """Workers and the live episodes they play.

    Args:
        setup: what a worker makes its environments from.
        withheld: environment variables workers do not get.
        name: of the environment, in messages.
    """

    def __init__(
        self,
        setup: bytes,
        withheld: Sequence[str],
        num_workers: int,
        reset_timeout: float,
        step_timeout: float,
        load_timeout: float,
        name: str,
        limits: WorkerLimits,
        spread_groups: bool | None,
    ):
        sweep()
        self.setup, self.withheld, self.name = setup, withheld, name
        self.reset_timeout, self.step_timeout, self.load_timeout = reset_timeout, step_timeout, load_timeout
        self.limits, self.spread_groups = limits, spread_groups
        self.workers: list[WorkerProcess | None] = [None] * num_workers  # that take new episodes
        self.episodes: dict[int, PooledEpisode] = {}  # the live ones, by slot
        self.owing: set[int] = set()  # slots of those that owe an answer
        self.answers: dict[int, Received] = {}  # that nobody has taken yet, in the order they came
        self.times = MeasuredTimes()
        self.replayed = 0  # episodes that were played again and went on
        self.recycled = 0  # workers replaced for their age or size
        self.in_service: list[WorkerProcess] = []  # these, and those that leave when their episodes have ended
        self._processes: list[WorkerProcess] = []  # and those that are being ended
        self._listener = Listener()
        self._lost_resets = LostResets()
        self._numbers = itertools.count()
        self._opened = 0  # episodes since times were aged
        self.close = weakref.finalize(self, _close, self._processes, self._listener, os.getpid())

    def fileno(self) -> int:
        return self._listener.fileno()

    # What is asked.

    def begin(
        self,
        tasks: Sequence[tuple[Mapping[str, Any], bytes]],
        groups: Sequence[Hashable],
        families: Sequence[Hashable],
    ) -> list[int]:
        """Open an episode of each task, given with its pickle, in the first free slots; they owe their resets."""
        with self._undisturbed():
            if not self.episodes:
                self._lost_resets.clear()
            if self._opened >= len(self.episodes):  # as many as play at a time
                self._opened = 0
                self.times.age()
            self._opened += len(tasks)
            self._recycle()
            load, hosts = self._load(), self._hosts()
            homes = place_episodes(groups, len(self.workers), self.times, self.spread_groups, load, hosts)
            free = (slot for slot in itertools.count() if slot not in self.episodes and slot not in self.answers)
            episodes = [
                PooledEpisode(next(self._numbers), slot, *task, group, family)
                for slot, task, group, family in zip(free, tasks, groups, families)
            ]
            self.episodes |= {episode.slot: episode for episode in episodes}
            self.owing |= {episode.slot for episode in episodes}
            self._submit(self._tried(episodes), dict(zip((episode.slot for episode in episodes), homes)))
            return [episode.slot for episode in episodes]

    def send(self, actions: Mapping[int, str]) -> None:
        """Ask live episodes that owe nothing for the answer to an action."""
        with self._undisturbed():
            for slot, action in actions.items():
                self.episodes[slot].action = action
            self.owing |= actions.keys()
            self._submit([self.episodes[slot] for slot in actions])

    def end(self, slots: Iterable[int]) -> None:
        """End live episodes, and forget answers that nobody took."""
        for slot in slots:
            self.answers.pop(slot, None)
            self.owing.discard(slot)
            episode = self.episodes.pop(slot, None)
            if episode is not None and episode.worker is not None:
                episode.worker.ended.append(episode.number)
        self._dismiss_leaving()

    def _submit(self, episodes: Sequence[PooledEpisode], homes: Mapping[int, int] | None = None) -> None:
        """Send what these episodes owe; those without a worker have one then, by slot the one of `homes`."""
        moved = [episode for episode in episodes if episode.worker is None]
        if moved and homes is None:
            homes = dict(zip((episode.slot for episode in moved), least_busy(self._load(), len(moved))))
        for index in sorted({homes[episode.slot] for episode in moved}):
            if self.workers[index] is None:  # all start before the first, still busy with starting, is spoken to
                self.workers[index] = self._start()
        played = {(episode.worker, episode.group) for episode in self.episodes.values()} if moved else set()
        jobs: dict[WorkerProcess, list[Job]] = defaultdict(list)
        for episode in episodes:
            if episode.worker is None:
                episode.worker = self.workers[homes[episode.slot]]
                kind = RESET if (episode.worker, episode.group) in played else FIRST_RESET
                played.add((episode.worker, episode.group))
                jobs[episode.worker] += episode.from_the_start(self.reset_timeout, self.step_timeout, kind)
            if episode.action is not None:
                jobs[episode.worker].append(episode.step(episode.action, self.step_timeout))
        for worker, of_worker in jobs.items():
            worker.send(of_worker)
            self._listener.sent(worker)

    def _start(self) -> WorkerProcess:
        self._processes[:] = [worker for worker in self._processes if not worker.gone]
        worker = WorkerProcess(self.setup, self.withheld, self.load_timeout)
        self._processes.append(worker)
        self.in_service.append(worker)
        self._listener.add(worker)
        return worker

    def _load(self) -> list[int]:
        """Live episodes of each worker."""
        load = Counter(episode.worker for episode in self.episodes.values())
        return [load[worker] if worker is not None else 0 for worker in self.workers]

    def _hosts(self) -> dict[Hashable, int]:
        """The worker that plays most of a group."""
        indices = {worker: index for index, worker in enumerate(self.workers) if worker is not None}
        members = Counter((e.group, indices[e.worker]) for e in self.episodes.values() if e.worker in indices)
        return {group: index for (group, index), _ in reversed(members.most_common())}

    # What is answered.

    def wait(self, timeout: float | None, slots: Sequence[int] | None = None) -> bool:
        """Take what has been answered. Are there answers, of all of these slots if some are given?

        Args:
            timeout: seconds to wait for them, if they are owed. `None`: as long as it takes.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with self._undisturbed():
            patience = 0.0
            while True:
                self._listen(patience)
                done = bool(self.answers) if slots is None else all(slot in self.answers for slot in slots)
                patience = until - time.monotonic()
                if done or not self.owing or patience <= 0:
                    return done

    def take(self, slots: Sequence[int] | None = None) -> dict[int, Received]:
        """The answers there are, or those of the given slots."""
        if slots is None:
            answers = dict(self.answers)
            self.answers.clear()
            return answers
        return {slot: self.answers.pop(slot) for slot in slots}

    def _listen(self, patience: float) -> None:
        for worker, said, fate in self._listener.listen(self.in_service, patience):
            why = "a message larger than any"
            try:
                for message in said:
                    self._hear(worker, message)
            except NoAnswerError as error:
                fate, why = "garbled", str(error)
            if fate:
                self._lose(worker, fate, why)
            elif worker.leaving:
                self._dismiss_leaving()

    def _hear(self, worker: WorkerProcess, message: bytes) -> None:
        """The answer to a worker's next job, if the message is one.

        Raises:
            NoAnswerError: when it is nothing that a worker says.
        """
        told = worker.take(message)
        if told is None:
            return
        job, answer = told
        episode = self._owing_of(job)
        if episode is None:  # also what was asked after a failure
            return
        result = answer.result
        if not job.expected and not _answers(job, answer):
            result = "invalid", f"the worker sent no answer to {job.command}"
        if isinstance(result, tuple):
            kind, text = result
            hidden = [name for name in self.withheld if name in text]
            if hidden:
                text += f"\nworkers do not get {', '.join(hidden)}: name it in environment_variables"
            self._settle(episode, episode.lost(text) if job.expected else episode.failure(kind, text))
        elif not job.expected:
            self.times.add(job.kind, answer.seconds)
            self.replayed += episode.note(job, answer.mark)
            self._settle(episode, result)

    def _owing_of(self, job: Job | None) -> PooledEpisode | None:
        """The live episode that a job is of, if it owes an answer."""
        episode = self.episodes.get(job.slot) if job else None
        return episode if episode and episode.number == job.episode and job.slot in self.owing else None

    def _settle(self, episode: PooledEpisode, answer: Received) -> None:
        self.owing.discard(episode.slot)
        self.answers[episode.slot] = answer
        failed = isinstance(answer, EnvironmentFailure)
        if failed or (isinstance(answer, StepResult) and (answer.terminated or answer.truncated)):
            del self.episodes[episode.slot]
            if failed and episode.worker is not None:
                episode.worker.ended.append(episode.number)
        elif episode.worker.outgrown:
            episode.move(episode.worker.outgrown)

    # What goes wrong.

    def _lose(self, worker: WorkerProcess, fate: str, why: str) -> None:
        """A worker hangs, died or talks nonsense. The episode it was at fails, the others that owe an answer are
        played elsewhere, and so are those that owe none, when they are next asked."""
        self._leave_service(worker)
        loss = end_lost(worker, fate, self.name, why)
        blamed = self._owing_of(loss.job)
        owing = {episode.slot: episode for job in worker.owed if (episode := self._owing_of(job))}
        for episode in self.episodes.values():
            if episode.worker is worker:
                episode.move(loss.message)
        if blamed:
            del owing[blamed.slot]
            if loss.job.command == "reset" and loss.job.expected is None:
                self._lost_resets.add(blamed, loss)
            self._fail(blamed, loss, again=loss.job.expected is not None)
        waiting = []
        for episode in self._tried(owing.values()):
            why = given_up(episode, loss)
            if why is None:
                waiting.append(episode)
            else:
                self._fail(episode, loss, why, again=not why and bool(episode.marks))
        self._submit(waiting)

    def _tried(self, episodes: Iterable[PooledEpisode]) -> list[PooledEpisode]:
        """Without those, which fail, whose task was reset in vain too often."""
        tried = []
        for episode in episodes:
            loss = self._lost_resets.enough(episode)
            if loss is None:
                tried.append(episode)
            else:
                self._fail(episode, loss, "not tried, for this task was reset in vain before: ")
        return tried

    def _fail(self, episode: PooledEpisode, loss: WorkerFailure, why: str = "", again: bool = False) -> None:
        """Answer for an episode that a loss ends; `again`: while it was played again, as its first time was not."""
        self._settle(episode, episode.lost(loss.message) if again else episode.failure(loss.kind, why + loss.message))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """After Ctrl-C, or when no worker can be started, nothing that is owed may answer what is asked next."""
        try:
            yield
        except BaseException:
            self.end([*self.episodes, *self.answers])
            busy = [worker for worker in self.in_service if worker.owed]
            for worker in busy:
                self._leave_service(worker)
                worker.end(wait=0.0)
            for worker in busy:
                worker.end()
            raise

    # Who leaves.

    def _recycle(self) -> None:
        """Replace workers that are old or big."""
        live = Counter(episode.worker for episode in self.episodes.values())
        leaving = sum(worker.leaving for worker in self.in_service)
        for index, worker in enumerate(self.workers):
            if worker is None:
                continue
            worker.outgrown = self.limits.too_big(worker, live[worker])
            if not worker.outgrown and not self.limits.is_old(worker, live[worker], leaving, len(self.workers)):
                continue
            self.workers[index], worker.leaving = None, True
            self.recycled += 1
            leaving += live[worker] > 0
            for episode in self.episodes.values():
                if worker.outgrown and episode.worker is worker and episode.slot not in self.owing:
                    episode.move(worker.outgrown)
        self._dismiss_leaving()

    def _dismiss_leaving(self) -> None:
        """End workers that leave and play nothing any more."""
        leaving = [worker for worker in self.in_service if worker.leaving and not worker.owed]
        if leaving:
            live = {episode.worker for episode in self.episodes.values()}
            for worker in leaving:
                if worker not in live:
                    self._leave_service(worker)
                    worker.end(patience=2.0, wait=0.0)

    def _leave_service(self, worker: WorkerProcess) -> None:
        self._listener.remove(worker)
        self.in_service = [other for other in self.in_service if other is not worker]
        self.workers = [None if other is worker else other for other in self.workers]


def _answers(job: Job, answer: Answer) -> bool:
    """Is it an answer to this job, or tells of its failure?"""
    wanted = StepResult if job.command == "step" else Observation
    return isinstance(answer.result, tuple) or (isinstance(answer.result, wanted) and answer.mark is not None)


def _close(processes: list[WorkerProcess], listener: Listener, owner: int) -> None:
    if os.getpid() == owner:
        listener.close()
    end_all(processes, owner)
