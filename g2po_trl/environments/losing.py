"""Lost workers: how one was lost and through which job, and when an episode that it took along is given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from .process import Job, WorkerProcess, how_it_ended
from .replay import Episode

MAX_LOST_WORKERS = 20  # that an episode loses before it has its answer; then it is given up
MAX_TIMEOUTS = 3  # of those, lost because a time limit passed
MAX_LOST_RESETS = 2  # of equal tasks; then the others of them are not tried


@dataclass(frozen=True)
class Loss:
    """A worker that was lost: how, and through which job, if through one."""

    kind: str
    message: str
    job: Job | None
    loaded: bool


def end_lost(worker: WorkerProcess, fate: str, name: str, why: str = "") -> Loss:
    """End a worker of the environment `name` that hangs (`"timeout"`), died (`"crash"`) or says what no worker says
    (`"garbled"`: `why` tells what)."""
    job = worker.owed[0] if worker.owed and worker.begun else None
    status = worker.end()
    if fate != "timeout":
        how = "it closed its connection" if status is None else how_it_ended(status)
        did = f"died ({how})" if fate == "crash" else f"was killed, since it sent no answer of a worker ({why}),"
        when = f"during {job.command} of slot {job.slot}" if job else "before it took up a job"
        when = when if worker.loaded else "when it was loaded"
        return Loss("crash", f"the worker process of {name} {did} {when}", job, worker.loaded)
    doing, limit, remedy = f"a worker of {name} takes up no job: it", worker.owed[0].limit, ""
    if job:
        doing = f"{name}.{job.command} in slot {job.slot}"
    elif not worker.loaded:
        doing, limit = f"loading {name} in a worker", worker.load_limit
        remedy = "; if its imports are only slow, raise environment_load_timeout (of a pool, load_timeout)"
    message = f"{doing} took more than {limit:g} s; its worker was killed{remedy}"
    return Loss("timeout", message, job, worker.loaded)


class LostResets:
    """Resets through which workers were lost, by what was reset: tasks that are not tried for ever."""

    def __init__(self):
        self._losses: dict[tuple[Hashable, bytes], list[Loss]] = defaultdict(list)

    def add(self, episode: Episode, loss: Loss) -> None:
        self._losses[episode.family, episode.pickled].append(loss)
        while len(self._losses) > 1000:  # families that are over, of a pool that is never reset
            self._losses.pop(next(iter(self._losses)))

    def clear(self) -> None:
        self._losses.clear()

    def enough(self, episode: Episode) -> Loss | None:
        """The last of those for which this episode's reset is not tried."""
        losses = self._losses.get((episode.family, episode.pickled), ())
        return losses[-1] if len(losses) >= MAX_LOST_RESETS and not episode.marks else None


def given_up(episode: Episode, loss: Loss) -> str | None:
    """Count a loss that was not this episode's fault while it owed an answer. Why does it fail, if it does?"""
    episode.lost_workers += 1
    episode.timeouts += loss.kind == "timeout"
    episode.moves += loss.job is None
    if loss.job is None and (episode.moves > 1 or (loss.kind == "timeout" and not loss.loaded)):
        return ""
    if episode.lost_workers >= MAX_LOST_WORKERS or episode.timeouts >= MAX_TIMEOUTS:
        return "given up, for one worker was lost after another: "
    return None
