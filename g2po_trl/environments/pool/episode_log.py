"""Record of an episode in the pool, from which it can be replayed, and the failure that can end it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...utils.images import Picture
from .limits import PoolLimits
from .worker_process import Job, WorkerProcess


@dataclass(frozen=True)
class EnvironmentFailure:
    """Failure in place of an observation or a step's result.

    Args:
        kind: `"exception"` (the environment raised), `"timeout"`, `"crash"` (its process ended), `"invalid"` (it
            violated its contract) or `"lost"` (another episode ended its worker, and replaying it failed).
        message: description with the place, and the worker's traceback if there is one.
    """

    kind: str
    message: str


@dataclass
class PooledEpisode:
    """A running episode."""

    number: int  # unique in the pool, also among ended episodes
    slot: int
    task: Mapping[str, Any]
    pickled: bytes  # the task as it is sent
    retry_group: Hashable  # per which failed resets of equal tasks are counted
    worker: WorkerProcess | None = None  # `None`: it must be replayed in another one
    action: str | None = None  # `None`: the reset is pending, or nothing
    actions: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of the answers, starting with the reset's
    pictures: dict[str, Picture] = field(default_factory=dict)  # that it has shown, by their hashes
    seconds: float = 0.0  # of its reset and steps, without replays
    reassignments: int = 0  # workers lost since the last answer, while running no job
    timeouts: int = 0  # and by a time limit
    reassignment_reason: str = ""  # how the last worker was lost

    def replay_jobs(self, limits: PoolLimits) -> list[Job]:
        """Return the jobs that replay the episode, with the expected digests."""
        first = self.digests[0] if self.digests else None
        timeout = limits.environment_reset_timeout
        reset = Job(self.number, self.slot, "reset", self.pickled, first, timeout, self.pictures)
        played = zip(self.actions, self.digests[1:])
        return [reset, *(self.step(action, limits, digest) for action, digest in played)]

    def step(self, action: str, limits: PoolLimits, expected: str | None = None) -> Job:
        timeout = limits.environment_step_timeout
        return Job(self.number, self.slot, "step", action, expected, timeout, self.pictures)

    def reassign(self, why: str) -> None:
        """Mark the episode for reassignment."""
        self.worker, self.reassignment_reason = None, why

    def record(self, job: Job, digest: str, seconds: float) -> bool:
        """Record the answer of a job; return whether the episode was replayed for it."""
        replayed = bool(self.reassignment_reason and self.digests)
        self.digests.append(digest)
        self.seconds += seconds
        if job.command != "reset":
            self.actions.append(self.action)
        self.reassignments = self.timeouts = 0
        self.action, self.reassignment_reason = None, ""
        return replayed

    def failure(self, kind: str, message: str) -> EnvironmentFailure:
        text = f"{_shortened(message, 8_000)}\nslot {self.slot}, task {_shortened(repr(self.task), 1_000)}"
        return EnvironmentFailure(kind, text.encode("utf-8", "backslashreplace").decode())

    def replay_failure(self, message: str) -> EnvironmentFailure:
        return self.failure("lost", f"{self.reassignment_reason}. Played again, {message}")


def _shortened(text: str, limit: int) -> str:
    """Return a long text without its middle, since a traceback's end matters most."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"
