"""The base of actors without token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from ..engines.sampling import Sampling
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..trajectory import Step


class TextActor:
    """Base of actors that answer all waiting episodes at once. It is its own session."""

    is_collective = streams = False
    asked: Sequence[Episode] = ()

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> TextActor:
        self.sampling, self.seeds, self.asked = sampling, seeds, ()
        return self

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked = [*self.asked, *episodes]

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        episodes, self.asked = self.asked, ()
        return list(zip(episodes, self.answer(episodes), strict=True)) if episodes else []

    def answer(self, episodes: Sequence[Episode]) -> Iterable[Step | None]:
        """Return the next step of each episode, or `None` for one that has been ended."""
        raise NotImplementedError
