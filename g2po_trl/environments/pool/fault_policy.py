"""Policy for lost workers: how a worker failed, in which job, and when its episodes are given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from ...utils.show import describe_exit
from .episode_log import EnvironmentFailure, PooledEpisode
from .worker_process import Job, WorkerProcess

MAX_TIMEOUTS = 3  # of workers, per answer; then the episode is given up
MAX_LOST_RESETS = 2  # of equal tasks in a retry group; then the other episodes of the task are not tried


@dataclass(frozen=True)
class WorkerFailure:
    """Loss of a worker: its kind and message, the running job if any, and whether the environment was loaded."""

    kind: str
    message: str
    job: Job | None
    loaded: bool

    def of(self, episode: PooledEpisode, why: str = "", in_replay: bool = False) -> EnvironmentFailure:
        """Return the failure of an episode. `in_replay`: it happened while the episode was replayed."""
        if in_replay:
            return episode.replay_failure(self.message)
        return episode.failure(self.kind, why + self.message)


def end_failed_worker(worker: WorkerProcess, failure_kind: str, name: str, why: str = "") -> WorkerFailure:
    """End a worker that failed by `"timeout"`, `"crash"` or a `"corrupt"` message (`why`), and return its failure."""
    job = worker.pending_jobs[0] if worker.pending_jobs and worker.job_started else None
    status = worker.end()
    when = "before it started a job" if worker.loaded else "while it was loading"
    if failure_kind == "timeout":
        limit = worker.pending_jobs[0].limit if worker.loaded else worker.load_limit
        what = f"{name}.{job.command} in slot {job.slot}" if job else f"{when}, a worker of {name}"
        message = f"{what} took more than {limit:g} s; its worker was killed"
        message += "" if worker.loaded else "; if its imports are only slow, raise environment_load_timeout"
        return WorkerFailure("timeout", message, job, worker.loaded)
    when = f"during {job.command} of slot {job.slot}" if job else when
    how = "it closed its connection" if status is None else describe_exit(status)
    how = f"sent an invalid message ({why})" if failure_kind == "corrupt" else f"died ({how})"
    return WorkerFailure("crash", f"the worker process of {name} {how} {when}", job, worker.loaded)


class FailedResets:
    """Resets that ended their workers, by retry group and task, to stop retrying them."""

    def __init__(self):
        self._failures: dict[tuple[Hashable, bytes], list[WorkerFailure]] = defaultdict(list)

    def add(self, episode: PooledEpisode, failure: WorkerFailure) -> None:
        self._failures[episode.retry_group, episode.pickled].append(failure)
        while len(self._failures) > 1000:  # old retry groups, in a pool that never empties
            self._failures.pop(next(iter(self._failures)))

    def clear(self) -> None:
        self._failures.clear()

    def last_failure(self, episode: PooledEpisode) -> WorkerFailure | None:
        """Return the failure because of which this episode's reset is not tried; `None`: it is tried."""
        failures = self._failures.get((episode.retry_group, episode.pickled), ())
        return failures[-1] if len(failures) >= MAX_LOST_RESETS and not episode.digests else None


def why_give_up(episode: PooledEpisode, failure: WorkerFailure) -> str | None:
    """Count a worker failure caused by another job; return why to give the episode up ("": it says all), or `None`."""
    episode.timeouts += failure.kind == "timeout"
    episode.reassignments += failure.job is None
    if failure.job is None and (episode.reassignments > 1 or (failure.kind == "timeout" and not failure.loaded)):
        return ""
    return "given up after several time-outs: " if episode.timeouts >= MAX_TIMEOUTS else None
