"""The workers of a pool: jobs go out, answers come in, and what a lost worker hosted is played again in another."""

from __future__ import annotations

import pickle
import selectors
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contract import Observation, StepResult
from .placement import FIRST_RESET, RESET, STEP, MeasuredTimes, least_busy
from .process import Job, WorkerProcess, how_it_ended
from .replay import EnvironmentFailure, Episode

MAX_ROUNDS = 20  # of one call, each after a worker was lost; then the rest fails too
MAX_LATE_ROUNDS = 3  # of those in which a time limit passed
MAX_LOST_RESETS = 2  # of equal tasks; then the others of them are not tried

Answer = Observation | StepResult | EnvironmentFailure


@dataclass(frozen=True)
class Loss:
    """A worker that was lost: how, and through which job, if through one."""

    kind: str
    message: str
    job: Job | None


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


class Fleet:
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
    ):
        self.setup, self.withheld, self.name = setup, withheld, name
        self.reset_timeout, self.step_timeout, self.load_timeout = reset_timeout, step_timeout, load_timeout
        self.workers: list[WorkerProcess | None] = [None] * num_workers
        self.episodes: dict[int, Episode] = {}
        self.times = MeasuredTimes()
        self.replayed = 0  # episodes that were played again and went on
        self._answers: dict[int, Answer] = {}  # of the call under way

    def open(self, episodes: Iterable[Episode], homes: Sequence[int]) -> dict[int, Answer]:
        """Reset these episodes, each in the worker given for it, instead of those that were live."""
        self.episodes = {episode.slot: episode for episode in episodes}
        for worker in self.workers:
            if worker is not None:
                worker.holds_old_episodes = True
        self.times.age()
        return self.play(dict.fromkeys(self.episodes), homes)

    def play(self, asked: Mapping[int, str | None], homes: Sequence[int] | None = None) -> dict[int, Answer]:
        """Answers to an action, or to a reset (`None`), by slot.

        Every round sends each worker its jobs and collects the answers. Slots whose worker was lost have another one
        in the next round, and are played again there.
        """
        answers = self._answers = {}
        rounds = late_rounds = 0
        lost_resets: dict[bytes, list[Loss]] = defaultdict(list)
        tasks = {slot: self.episodes[slot].pickled for slot in asked}
        waiting = dict(asked)
        while waiting:
            losses = self._round(waiting, homes)
            homes, rounds = None, rounds + 1
            late_rounds += any(loss.kind == "timeout" for loss in losses)
            for loss in losses:
                if loss.job and loss.job.command == "reset" and loss.job.expected is None:
                    lost_resets[tasks[loss.job.slot]].append(loss)
            waiting = {slot: action for slot, action in waiting.items() if slot not in answers}
            for slot in waiting:
                same = lost_resets[tasks[slot]]
                if len(same) >= MAX_LOST_RESETS:
                    self._fail(slot, same[-1], "not tried, for this task was reset in vain before: ")
                elif rounds >= MAX_ROUNDS or late_rounds >= MAX_LATE_ROUNDS:
                    self._fail(slot, losses[-1], "given up, for one worker was lost after another: ")
            waiting = {slot: action for slot, action in waiting.items() if slot not in answers}
        return answers

    def _round(self, asked: Mapping[int, str | None], homes: Sequence[int] | None) -> list[Loss]:
        """Take all answers there are; give the workers that were lost."""
        jobs = self._jobs(asked, homes)
        losses: list[Loss] = []
        try:
            messages = {}
            for index, of_worker in jobs.items():
                plain = [(job.slot, job.command, job.argument, job.expected) for job in of_worker]
                worker = self.workers[index]
                messages[index] = pickled((worker is not None and worker.holds_old_episodes, plain))
            for index in jobs:  # all start before the first, still busy with starting, is spoken to
                if self.workers[index] is None:
                    self.workers[index] = WorkerProcess(self.setup, self.withheld, self.load_timeout)
            for index, message in messages.items():
                self.workers[index].send(message, jobs[index])
            for index, kind in self._collect(set(jobs)):
                losses.append(self._lose(index, kind, asked))
        except BaseException:  # Ctrl-C: what a worker still owes must not answer the next call
            self.episodes.clear()
            for index in jobs:
                worker, self.workers[index] = self.workers[index], None
                if worker is not None:
                    worker.end()
            raise
        return losses

    def _jobs(self, asked: Mapping[int, str | None], homes: Sequence[int] | None) -> dict[int, list[Job]]:
        """What each worker has to do; episodes without a worker have one then."""
        moved = [slot for slot in asked if self.episodes[slot].worker is None]
        if homes is None:
            live = [episode.worker for episode in self.episodes.values() if episode.worker is not None]
            homes = least_busy(live, len(self.workers), len(moved))
        home = dict(zip(moved, homes))
        jobs: dict[int, list[Job]] = defaultdict(list)
        begun = set()
        for slot, action in asked.items():
            episode = self.episodes[slot]
            if slot in home:
                episode.worker = home[slot]
                kind = RESET if (episode.worker, episode.group) in begun else FIRST_RESET
                begun.add((episode.worker, episode.group))
                jobs[episode.worker] += episode.from_the_start(self.reset_timeout, self.step_timeout, kind)
            if action is not None:
                jobs[episode.worker].append(Job(slot, "step", action, None, self.step_timeout, STEP))
        return jobs

    def _collect(self, busy: set[int]) -> Iterable[tuple[int, str]]:
        """Take answers until no worker owes one; gives the workers that hang or died, and which of the two."""
        with selectors.DefaultSelector() as selector:
            for index in busy:
                channel = self.workers[index].channel
                selector.register(
                    channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0), index
                )
            while busy:
                patience = min(self.workers[index].deadline for index in busy) - time.monotonic()
                ready = {key.data: events for key, events in selector.select(min(max(0.0, patience), 1.0))}
                for index in sorted(busy):
                    worker, kind = self.workers[index], None
                    if ready.get(index, 0) & selectors.EVENT_WRITE:
                        worker.channel.flush()
                        if not worker.channel.unsent:
                            selector.modify(worker.channel, selectors.EVENT_READ, index)
                    # A process that a dead worker forked can hold the channel open: its end is seen by looking.
                    dead = index not in ready and worker.is_dead()
                    late = time.monotonic() > worker.deadline
                    if index in ready or dead or late:
                        try:
                            heard = self._take(worker)
                            kind = "crash" if dead else "timeout" if late and not heard else None
                        except EOFError:
                            kind = "crash"
                    if not worker.owed or kind:
                        busy.discard(index)
                        selector.unregister(worker.channel)
                    if worker.owed and kind:
                        yield index, kind

    def _take(self, worker: WorkerProcess) -> bool:
        """What a worker says: that it takes up its jobs, or the answer to the next one. Did it say anything?

        Raises:
            EOFError: it has ended.
        """
        messages = worker.channel.receive()
        for message in messages:
            if not message:
                worker.taken_up()
                continue
            job = worker.owed.popleft()
            worker.start_next()
            if job.slot in self._answers:  # what was asked after its failure
                continue
            episode = self.episodes[job.slot]
            try:
                seconds, mark, answer = pickle.loads(message)
            except Exception as error:  # a class that unpickles in the worker only
                seconds, mark = 0.0, None
                answer = "invalid", f"what {self.name}.{job.command} returned cannot be unpickled: {error!r}"
            if isinstance(answer, tuple):
                kind, text = answer
                hidden = [name for name in self.withheld if name in text]
                if hidden:
                    text += f"\nworkers do not get {', '.join(hidden)}: name it in environment_variables"
                self._settle(job.slot, episode.lost(text) if job.expected else episode.failure(kind, text))
            elif not job.expected:
                self.times.add(job.kind, seconds)
                self.replayed += episode.note(job, mark)
                self._settle(job.slot, answer)
        return bool(messages)

    def _lose(self, index: int, kind: str, asked: Mapping[int, str | None]) -> Loss:
        """End a worker that hangs or died. The episode it was at fails, the others are without a worker."""
        worker, self.workers[index] = self.workers[index], None
        job = worker.owed[0] if worker.begun else None
        if kind == "crash":
            status = how_it_ended(worker.end(patience=1.0))
            when = f"during {job.command} of slot {job.slot}" if job else "before it took up a job"
            when = when if worker.loaded else "when it was loaded"
            message = f"the worker process of {self.name} died ({status}) {when}"
        else:
            worker.end()
            doing, limit, remedy = f"a worker of {self.name} takes up no job: it", worker.owed[0].limit, ""
            if job:
                doing = f"{self.name}.{job.command} in slot {job.slot}"
            elif not worker.loaded:
                doing, limit = f"loading {self.name} in a worker", worker.load_limit
                remedy = "; if its imports are only slow, raise environment_load_timeout (of a pool, load_timeout)"
            message = f"{doing} took more than {limit:g} s; its worker was killed{remedy}"
        loss = Loss(kind, message, job)
        if job and job.slot not in self._answers:
            self._fail(job.slot, loss, again=job.expected is not None)
        for episode in [episode for episode in self.episodes.values() if episode.worker == index]:
            episode.worker, episode.why_moved = None, message
            episode.moves += job is None
            hopeless = job is None and (episode.moves > 1 or (kind == "timeout" and not worker.loaded))
            if hopeless and episode.slot in asked and episode.slot not in self._answers:
                self._fail(episode.slot, loss, again=bool(episode.marks))
        return loss

    def _fail(self, slot: int, loss: Loss, why: str = "", again: bool = False) -> None:
        """Answer for an episode that a loss ends; `again`: while it was played again, as its first time was not."""
        episode = self.episodes[slot]
        self._settle(slot, episode.lost(loss.message) if again else episode.failure(loss.kind, why + loss.message))

    def _settle(self, slot: int, answer: Answer) -> None:
        self._answers[slot] = answer
        if isinstance(answer, EnvironmentFailure) or (
            isinstance(answer, StepResult) and (answer.terminated or answer.truncated)
        ):
            self.episodes.pop(slot)
