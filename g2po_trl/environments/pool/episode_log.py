"""An episode in the pool: what it is made of, so that it can be played again, and how it can end without a result."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .placement import STEP
from .worker_process import Job, WorkerProcess


@dataclass(frozen=True)
class EnvironmentFailure:
    """Takes the place of an observation or a step's result.

    Args:
        kind: `"exception"` (it raised), `"timeout"`, `"crash"` (its process ended), `"invalid"` (it violated its
            contract) or `"lost"` (its worker failed because of another episode, and it could not be replayed).
        message: what happened where, with the worker's traceback if there is one.
    """

    kind: str
    message: str


@dataclass
class PooledEpisode:
    """An episode under way.

    Args:
        number: no other episode of the pool has or had it.
        pickled: the task, as it is sent.
        family: episodes of equal tasks and families are tried together, and given up together.
        worker: the worker that plays it; `None`: it has to be played from the start.
        action: what it owes an answer to; `None`: its reset, or nothing.
        actions, marks: played so far, and the marks of the answers, the reset's first.
        moves, lost_workers, timeouts: workers it lost while it owed its answer: through nobody's fault, in all, and
            because a time limit passed.
        why_moved: how it lost its worker.
    """

    number: int
    slot: int
    task: Mapping[str, Any]
    pickled: bytes
    group: Hashable
    family: Hashable
    worker: WorkerProcess | None = None
    action: str | None = None
    actions: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    moves: int = 0
    lost_workers: int = 0
    timeouts: int = 0
    why_moved: str = ""

    def from_the_start(self, reset_timeout: float, step_timeout: float, kind: str) -> list[Job]:
        """Reset and the actions so far, whose answers must have the marks they had. `kind`: of the reset's time."""
        first = self.marks[0] if self.marks else None
        reset = Job(self.number, self.slot, "reset", self.pickled, first, reset_timeout, kind)
        played = zip(self.actions, self.marks[1:])
        return [reset, *(self.step(action, step_timeout, mark) for action, mark in played)]

    def step(self, action: str, step_timeout: float, expected: str | None = None) -> Job:
        return Job(self.number, self.slot, "step", action, expected, step_timeout, STEP)

    def move(self, why: str) -> None:
        """It needs another worker."""
        self.worker, self.why_moved = None, why

    def note(self, job: Job, mark: str) -> bool:
        """Take down a new answer. Was the episode played again for it?"""
        again = bool(self.why_moved and self.marks)
        self.marks.append(mark)
        if job.command != "reset":
            self.actions.append(self.action)
        self.moves = self.lost_workers = self.timeouts = 0
        self.action, self.why_moved = None, ""
        return again

    def failure(self, kind: str, message: str) -> EnvironmentFailure:
        """The failure that ends it, with its task."""
        text = f"{_shortened(message, 8_000)}\nslot {self.slot}, task {_shortened(repr(self.task), 1_000)}"
        return EnvironmentFailure(kind, text.encode("utf-8", "backslashreplace").decode())

    def lost(self, message: str) -> EnvironmentFailure:
        """The same, when it failed while it was played again."""
        return self.failure("lost", f"{self.why_moved}. Played again, {message}")


def _shortened(text: str, limit: int) -> str:
    """The text without its middle when it is long: the end of a traceback says most."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"
