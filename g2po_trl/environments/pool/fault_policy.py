"""Lost workers: how one was lost and through which job, and when an episode that it took along is given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from .episode_log import PooledEpisode
from .worker_process import Job, WorkerProcess, how_it_ended

MAX_LOST_WORKERS = 20  # that an episode loses before it has its answer; then it is given up
MAX_TIMEOUTS = 3  # of those, lost because a time limit passed
MAX_LOST_RESETS = 2  # of equal tasks; then the others of them are not tried


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that was lost: how, and through which job, if through one."""

    kind: str
    message: str
    job: Job | None
    loaded: bool


def end_lost(worker: WorkerProcess, fate: str, name: str, why: str = "") -> WorkerFailure:
    """End a worker of the environment `name` that hangs (`"timeout"`), died (`"crash"`) or says what no worker says
    (`"garbled"`: `why` tells what)."""
    job = worker.owed[0] if worker.owed and worker.begun else None
    status = worker.end()
    if fate != "timeout":
        how = "it closed its connection" if status is None else how_it_ended(status)
        did = f"died ({how})" if fate == "crash" else f"was killed, since it sent no answer of a worker ({why}),"
        when = f"during {job.command} of slot {job.slot}" if job else "before it took up a job"
        when = when if worker.loaded else "when it was loaded"
        return WorkerFailure("crash", f"the worker process of {name} {did} {when}", job, worker.loaded)
    doing, limit, remedy = f"a worker of {name} takes up no job: it", worker.owed[0].limit, ""
    if job:
        doing = f"{name}.{job.command} in slot {job.slot}"
    elif not worker.loaded:
        doing, limit = f"loading {name} in a worker", worker.load_limit
        remedy = "; if its imports are only slow, raise load_timeout (in environment_pool_kwargs; of g2po evaluate, "
        remedy += "--environment-load-timeout)"
    message = f"{doing} took more than {limit:g} s; its worker was killed{remedy}"
    return WorkerFailure("timeout", message, job, worker.loaded)


class LostResets:
    """Resets through which workers were lost, by what was reset: tasks that are not tried for ever."""

    def __init__(self):
        self._losses: dict[tuple[Hashable, bytes], list[WorkerFailure]] = defaultdict(list)

    def add(self, episode: PooledEpisode, loss: WorkerFailure) -> None:
        self._losses[episode.family, episode.pickled].append(loss)
        while len(self._losses) > 1000:  # families that are over, of a pool that is never reset
            self._losses.pop(next(iter(self._losses)))

    def clear(self) -> None:
        self._losses.clear()

    def enough(self, episode: PooledEpisode) -> WorkerFailure | None:
        """The last of those for which this episode's reset is not tried."""
        losses = self._losses.get((episode.family, episode.pickled), ())
        return losses[-1] if len(losses) >= MAX_LOST_RESETS and not episode.marks else None


def given_up(episode: PooledEpisode, loss: WorkerFailure) -> str | None:
    """Count a loss that was not this episode's fault while it owed an answer. Why does it fail, if it does?"""
    episode.lost_workers += 1
    episode.timeouts += loss.kind == "timeout"
    episode.moves += loss.job is None
    if loss.job is None and (episode.moves > 1 or (loss.kind == "timeout" and not loss.loaded)):
        return ""
    if episode.lost_workers >= MAX_LOST_WORKERS or episode.timeouts >= MAX_TIMEOUTS:
        return "given up, for one worker was lost after another: "
    return None


@dataclass(frozen=True)
class WorkerLimits:
    """See `EnvironmentPool`.

    An old worker that has live episodes plays them to their ends, beside the one that takes its place; of `workers`
    only some do so at once, since they hold memory. A big one ends as soon as it owes no answer: its live episodes are
    played again elsewhere.
    """

    max_resets: int | None = None
    max_memory: float | None = None

    def is_old(self, worker: WorkerProcess, live: int, leaving: int, workers: int) -> bool:
        """Is it to be replaced for its age?

        Args:
            live: episodes that it plays.
            leaving: workers that leave already.
        """
        old = self.max_resets is not None and worker.resets >= self.max_resets
        return old and (not live or leaving < max(1, workers // 4))

    def too_big(self, worker: WorkerProcess, live: int) -> str:
        """Why it is to be replaced for its size, if it is. Looks once in as many resets as it plays episodes."""
        if self.max_memory is None or worker.resets - worker.looked_at < max(1, live):
            return ""
        worker.looked_at = worker.resets
        memory = worker.memory()
        if memory <= self.max_memory:
            return ""
        return f"its worker was replaced: it held {memory:,} bytes, and max_worker_memory is {self.max_memory:,.0f}"
