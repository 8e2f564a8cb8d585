"""Groups whose episodes were all paid the same are played again, on other tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.sampling import derived_seed
from ..environments.tasks import own_columns, task_id_of
from ..trajectory import Trajectory
from .stats import RolloutStats

Row = dict[str, Any]
# (rows, groups) -> a trajectory of each row, and what they cost. All ranks call it together.
Play = Callable[[Sequence[Row], Sequence[int]], tuple[list[Trajectory], RolloutStats]]


@dataclass
class Rollout:
    """A rollout: of each row a trajectory, what gave way to it, and what all of them cost.

    `replaced_groups`: of each replaced trajectory (which time its group was replaced, its group): each of one task.
    """

    trajectories: list[Trajectory]
    stats: RolloutStats
    replaced: list[Trajectory] = field(default_factory=list)
    replaced_groups: list[tuple[int, int]] = field(default_factory=list)

    @property
    def all(self) -> list[Trajectory]:
        """Everything that was played."""
        return self.trajectories + self.replaced

    @property
    def errors(self) -> list[str | None]:
        """Of episodes from the beginning that environments have ended."""
        return [played.error for played in self.all if played.outcome == "error" and played.parent is None]


@dataclass
class Refill:
    """Plays rollouts whose groups have something to compare, as far as `times` goes.

    Args:
        times: how many times a rollout's number of groups may be played; 1: none is played again.
        tasks: rows to draw other tasks from. They follow from `seed` and the rollout's number.
        set_aside: ids of tasks that are not drawn.
        gather: a list of each rank -> the lists of all, joined.
    """

    times: int
    tasks: Sequence[Row]
    seed: int
    set_aside: Container[str] = ()
    gather: Callable[[list], list] = list

    def play(self, play: Play, rows: Sequence[Row], groups: Sequence[int], number: int) -> Rollout:
        """Play this rank's `rows`, whose groups may have members on other ranks. All ranks call it together.

        A group that is played again keeps the newest of its tasks, also when that has taught nothing either.
        """
        played = Rollout(*play(rows, groups))
        if self.times == 1:
            return played
        others = self._other_tasks(self.gather([task_id_of(row) for row in rows]), number)
        left, time = (self.times - 1) * len(set(self.gather(list(groups)))), 0
        while left > 0:
            again = without_spread(self.gather(_rewards(played.trajectories, groups)))[:left]
            if not again:
                break
            left -= len(again)
            task_of = dict(zip(again, others))
            again = [group for group in again if group in task_of]
            if not again:  # no other task is left
                break
            places = [place for place, group in enumerate(groups) if group in task_of]
            own = [groups[place] for place in places]
            new, stats = play([task_of[group] for group in own], own)
            played.stats = played.stats.and_then(stats)
            played.replaced += [played.trajectories[place] for place in places]
            time += 1
            played.replaced_groups += [(time, group) for group in own]
            for place, trajectory in zip(places, new):
                played.trajectories[place] = trajectory
        return played

    def _other_tasks(self, names: Iterable[str], number: int) -> Iterable[Row]:
        """Each of the others once, in an order of this rollout."""
        names = set(names)
        for place in random.Random(derived_seed(self.seed, number)).sample(range(len(self.tasks)), len(self.tasks)):
            row = own_columns(self.tasks[place])
            if task_id_of(row) not in names and task_id_of(row) not in self.set_aside:
                yield row


def without_spread(rewards: Iterable[tuple[int, float | None]]) -> list[int]:
    """Groups whose episodes were all paid the same, in order; `None` for an episode that does not count."""
    of_group: dict[int, set[float]] = {}
    for group, reward in rewards:
        of_group.setdefault(group, set()).update([] if reward is None else [reward])
    return sorted(group for group, values in of_group.items() if len(values) < 2)


def _rewards(trajectories: Sequence[Trajectory], groups: Sequence[int]) -> list[tuple[int, float | None]]:
    return [(group, played.reward if played.counted else None) for group, played in zip(groups, trajectories)]
