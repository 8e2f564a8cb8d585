"""Schedules of rollouts: a strategy decides which episodes a rollout plays, and when.

A trainer calls `collect` once per iteration and does not depend on the schedule otherwise. `SynchronousRollout` plays
one episode of each row from beginning to end; other strategies extend or replace it (`DynamicSampling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engines.sampling import Sampling
from ..trajectory import Trajectory
from ..utils.options import Choice
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
        """Refuse (`G2POError`) settings and options that the strategy does not support, before a model is loaded."""

    def collect(self, rows: Sequence[Row], groups: Sequence[int], iteration: int) -> Rollout:
        """Play a rollout of the current policy.

        Args:
            rows: this rank's rows of the batch.
            groups: group of each row, counted over all ranks.
            iteration: number of the iteration, from 1; each policy increases it by one.
        """


@dataclass(frozen=True)
class RolloutContext:
    """The parts of a run that a strategy plays with.

    Args:
        player: plays the episodes.
        group_size: episodes of a group, all of one task.
        tasks: rows that further tasks are drawn from.
        seed: seed of these draws and of completions.
        sampling: how completions are sampled.
        gather: function from a list of each rank to the concatenated lists of all ranks.
        progress: returns a context with a function `on_turn`, see `Loop`, or with `None`.
    """

    player: Player
    group_size: int
    tasks: Sequence[Row] = ()
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    gather: Callable[[list], list] = list
    progress: Callable[[], AbstractContextManager[OnTurn | None]] = nullcontext

    def play(self, rows: Sequence[Row], groups: Sequence[int]) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each row and return the trajectories and their costs. See `Player.play`."""
        with self.progress() as on_turn:
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


STRATEGIES = {
    "synchronous": Choice(
        "rollout.strategy:SynchronousRollout", "`num_generations` of each task to their ends, exactly on-policy"
    ),
    "dynamic_sampling": Choice(
        "rollout.dynamic_sampling:DynamicSampling", "groups whose rewards are all equal are replaced by other tasks"
    ),
}
