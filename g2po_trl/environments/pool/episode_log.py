"""Record of an episode in the pool, from which it can be replayed, and the failure that can end it."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...utils.images import Picture


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


@dataclass(eq=False)
class PooledEpisode:
    """A running episode."""

    number: int  # unique in the pool, also among ended episodes
    slot: int
    group: Hashable  # whose episodes share a worker
    task: Mapping[str, Any]
    arguments: list[Any]  # the pickled task of the reset, then the actions
    digests: list[str] = field(default_factory=list)  # of the answers; one fewer than arguments if one is pending
    worker: Any = None  # its `WorkerProcess`; `None`: it must be replayed in another one
    pictures: dict[str, Picture] = field(default_factory=dict)  # that it has shown, by their hashes
    seconds: float = 0.0  # of its steps, without replays
    lost_workers: int = 0  # since the last answer, by a time limit or while running no job
    loss: str = ""  # how the last worker was lost since the last answer

    def jobs(self, first: int) -> list[Job]:
        """Return its jobs from the `first` one on; those that have been answered expect the same answer."""
        expected = dict(enumerate(self.digests))
        numbers = range(first, len(self.arguments))
        return [Job(self, "step" if n else "reset", self.arguments[n], expected.get(n)) for n in numbers]

    def record(self, digest: str, seconds: float) -> bool:
        """Record an answer; return whether the episode was replayed for it."""
        replayed = bool(self.loss and self.digests)
        self.seconds += seconds if self.digests else 0.0  # `reset` is not the model's time
        self.digests.append(digest)
        self.lost_workers, self.loss = 0, ""
        return replayed

    def failure(self, kind: str, message: str, in_replay: bool = False) -> EnvironmentFailure:
        """Return the failure of this episode. `in_replay`: it happened while the episode was replayed."""
        if in_replay:
            kind, message = "lost", f"{self.loss}. Played again, {message}"
        text = f"{_shortened(message, 8_000)}\nslot {self.slot}, task {_shortened(repr(self.task), 1_000)}"
        return EnvironmentFailure(kind, text.encode("utf-8", "backslashreplace").decode())


@dataclass(frozen=True, eq=False)
class Job:
    """One reset or step of an episode."""

    episode: PooledEpisode
    command: str  # "reset" or "step"
    argument: Any  # the pickled task of a reset, or the action of a step
    expected: str | None  # the digest of its answer if it is a replay
    number: int = field(default_factory=lambda: secrets.randbits(62))  # in the answer; so none can be forged


def _shortened(text: str, limit: int) -> str:
    """Return a long text without its middle, since a traceback's end matters most."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"
