"""Schedules of rollouts: a strategy decides which episodes a rollout plays, and when.

A trainer calls `collect` once per iteration and does not depend on the schedule otherwise. `SynchronousRollout` plays
one episode of each row from beginning to end; other strategies extend or replace it (`DynamicSampling`, and in
`g2po_trl.experimental` `PartialRollouts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engines.sampling import Sampling
from ..trajectory import Trajectory
from .player import Player
from .stats import RolloutStats

Row = dict[str, Any]  # of the dataset: the keyword arguments of an environment's `reset`
OnTurn = Callable[[int, int], None]


@dataclass
class Rollout:
    """Trajectories of one rank, or of all ranks, and their costs.

    Args:
        trajectories: whole groups, group by group; they are trained on.
        stats: costs of all episodes that were played.
        replaced: trajectories of replaced groups. They count in statistics and are not trained on.
        replaced_groups: for each of `replaced`, (how many times its group had been replaced, the group).
    """

    trajectories: list[Trajectory]
    stats: RolloutStats
    replaced: list[Trajectory] = field(default_factory=list)
    replaced_groups: list[tuple[int, int]] = field(default_factory=list)

    @property
    def all(self) -> list[Trajectory]:
        """All trajectories that were played."""
        return self.trajectories + self.replaced

    @property
    def errors(self) -> list[str | None]:
        """Errors of the trajectories that environments ended."""
        return [played.error for played in self.all if played.outcome == "error"]


class RolloutStrategy(Protocol):
    """Decides which episodes a rollout plays, and when. All ranks call each method together.

    The keyword-only parameters of its constructor are the strategy's options (`rollout_strategy_kwargs`).
    """

    @classmethod
    def check(cls, args: Any, **options: Any) -> None:
        """Refuse settings that the strategy does not support, before tasks are prepared and a model is loaded.

        Args:
            args: an object with the fields of a `G2POConfig`.
            **options: the strategy's options.

        Raises:
            G2POError: for the first such setting.
        """

    def collect(self, rows: Sequence[Row], groups: Sequence[int], iteration: int) -> Rollout:
        """Play a rollout of the current policy.

        Args:
            rows: this rank's rows of the batch.
            groups: group of each row, counted over all ranks.
            iteration: number of the iteration, from 1; each policy increases it by one.
        """

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Return the strategy's own metrics, given the last rollout of all ranks without texts."""

    def reset(self) -> None:
        """End unfinished episodes. Called when training begins."""

    def state_dict(self) -> Any:
        """Return the state of all ranks for a checkpoint, as plain data."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state that `state_dict` returned, possibly with another number of ranks."""


@dataclass(frozen=True)
class RolloutContext:
    """The parts of a run that a strategy plays with.

    Args:
        player: plays the episodes.
        group_size: episodes of a group, all of one task.
        tasks: rows that further tasks are drawn from.
        seed: seed of these draws and of completions.
        sampling: how completions are sampled.
        rank: this process.
        gather: function from a list of each rank to the concatenated lists of all ranks.
        progress: (total, episodes, unit of the total) -> a context with a function that is called with
            (progress, running episodes), or `None`.
        batches_left: returns the number of rollouts still to be trained on, including this one. `None`: no bound.
    """

    player: Player
    group_size: int
    tasks: Sequence[Row] = ()
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    rank: int = 0
    gather: Callable[[list], list] = list
    progress: Callable[[int, int, str], AbstractContextManager[OnTurn | None]] = lambda *_: nullcontext()
    batches_left: Callable[[], int | None] = lambda: None

    def play(self, rows: Sequence[Row], groups: Sequence[int]) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each row and return the trajectories and their costs. See `Player.play`."""
        with self.progress(self.player.max_turns, self.player.number_of(rows), "turn") as on_turn:
            return self.player.play(rows, self.sampling, groups, on_turn=on_turn)


class SynchronousRollout:
    """Plays one episode of each row, and ends when all of them have ended: exactly on-policy."""

    def __init__(self, context: RolloutContext):
        self.context = context

    @classmethod
    def check(cls, args: Any) -> None:
        pass

    def collect(self, rows: Sequence[Row], groups: Sequence[int], iteration: int) -> Rollout:
        return Rollout(*self.context.play(rows, groups))

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        return {}

    def reset(self) -> None:
        pass

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass
