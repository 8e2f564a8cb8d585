"""Rollouts in two parts: some episodes of each group from the beginning, the others from where they teach more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..trajectory import Trajectory
from .episodes import NOT_RETURNED, Branch
from .stats import RolloutStats

Row = dict[str, Any]
# (rows, groups, branches) -> a trajectory of each row, and what they cost. All ranks call it together.
Play = Callable[[Sequence[Row], Sequence[int], Sequence[Branch | None]], tuple[list[Trajectory], RolloutStats]]
# (groups of trajectories, branches of a group at most) -> (place among all trajectories, position) of each branch
Choose = Callable[[Sequence[Sequence[Trajectory]], int], Sequence[tuple[int, int]]]


@dataclass
class Branching:
    """Holds back some episodes of each group until the others have ended, and branches where a rule says so.

    Args:
        held_back: episodes of a group that may become branches. Those that do not are played from the beginning.
        group_size: episodes of a group; a rank plays whole groups.
        choose: the rule.
        compares_keys: compare the environment's state keys, too, when a state is returned to.
        no_return: ids of tasks whose environment came to other states when the same actions were played again. They
            are not branched any more.
    """

    held_back: int
    group_size: int
    choose: Choose
    compares_keys: bool = True
    no_return: set[str] = field(default_factory=set)

    def play(self, play: Play, rows: Sequence[Row], groups: Sequence[int]) -> tuple[list[Trajectory], RolloutStats]:
        """A trajectory of each row. The branches of a group come last in it."""
        size = self.group_size - self.held_back
        first = [place for place in range(len(rows)) if place % self.group_size < size]
        later = [place for place in range(len(rows)) if place % self.group_size >= size]
        whole, stats = play([rows[i] for i in first], [groups[i] for i in first], [None] * len(first))
        of_group = self._branches([whole[i : i + size] for i in range(0, len(whole), size)])
        branches = [next(of_group[place // self.group_size], None) for place in later]
        more, further = play([rows[i] for i in later], [groups[i] for i in later], branches)
        self.no_return |= {t.task_id for t in more if (t.error or "").startswith(NOT_RETURNED)}
        trajectories = dict(zip([*first, *later], [*whole, *more]))
        return [trajectories[place] for place in range(len(rows))], stats.and_then(further)

    def state(self) -> list[str]:
        """What a checkpoint keeps. Plain data."""
        return sorted(self.no_return)

    def restore(self, state: Sequence[str]) -> None:
        """Take up what `state` gave."""
        self.no_return |= set(state)

    def _branches(self, groups: Sequence[Sequence[Trajectory]]) -> list[Iterator[Branch]]:
        """The branches of each group."""
        size = len(groups[0])
        found: list[list[Branch]] = [[] for _ in groups]
        for place, position in self.choose(groups, self.held_back):
            group, parent = divmod(place, size)
            if not 0 <= group < len(groups) or len(found[group]) == self.held_back:
                self._refuse(place, position)
            trajectory = groups[group][parent]
            if not trajectory.counted or not 0 < position < len(trajectory.steps):
                self._refuse(place, position)
            if trajectory.task_id not in self.no_return:
                found[group].append(Branch(parent, trajectory.steps[: position + 1], self.compares_keys))
        return [iter(branches) for branches in found]

    def _refuse(self, place: int, position: int) -> None:
        raise ValueError(
            f"choose_branches returned trajectory {place}, position {position}: name trajectories with a result, "
            f"positions after the first step and before the end, and at most {self.held_back} of a group"
        )
