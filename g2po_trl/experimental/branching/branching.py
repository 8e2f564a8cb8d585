"""Groups in two parts: some episodes from the beginning, then the others, from where they teach more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index

from ...rollout.episode import NOT_RETURNED, Branch, Episode
from ...rollout.stats import RolloutStats
from ...trajectory import Trajectory

logger = logging.getLogger(__name__)

# (places, branches) -> a trajectory of each place, and what they cost. All ranks call it together.
Play = Callable[[Sequence[int], Sequence[Branch | None]], tuple[list[Trajectory], RolloutStats]]
# (groups of trajectories, branches of a group at most) -> (place among all trajectories, position) of each branch
Choose = Callable[[Sequence[Sequence[Trajectory]], int], Sequence[tuple[int, int]]]


@dataclass
class Branching:
    """Holds back some episodes of each group until its others have ended, and branches where a rule says so.

    Args:
        held_back: episodes of a group that may become branches. Those that do not are played from the beginning.
        group_size: episodes of a group; a rank plays whole groups.
        choose: the rule.
        compares_keys: compare the environment's state keys, too, when a state is returned to.
        no_return: ids of tasks whose environment came to other states when the same actions were played again. They
            are not branched any more.
        gather: a list of each rank -> the lists of all, joined.
    """

    held_back: int
    group_size: int
    choose: Choose
    compares_keys: bool = True
    no_return: set[str] = field(default_factory=set)
    gather: Callable[[list], list] = list

    @property
    def first(self) -> int:
        """Episodes of each group that are not held back: whatever happens, as many of each task."""
        return self.group_size - self.held_back

    def play(self, play: Play, number: int) -> tuple[list[Trajectory], RolloutStats]:
        """A trajectory of each of so many places, whole groups: held-back ones when all others have ended."""
        size = self.first
        first = [place for place in range(number) if place % self.group_size < size]
        later = [place for place in range(number) if place % self.group_size >= size]
        whole, stats = play(first, [None] * len(first))
        of_group = list(map(iter, self.branches([whole[i : i + size] for i in range(0, len(whole), size)])))
        more, further = play(later, [next(of_group[place // self.group_size], None) for place in later])
        self.note([*whole, *more])
        trajectories = dict(zip([*first, *later], [*whole, *more]))
        return [trajectories[place] for place in range(number)], stats.and_then(further)

    def branches(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[Branch]]:
        """Those of each group, whose first episodes are given.

        Raises:
            ValueError: if the rule names what is not there.
        """
        found: list[list[Branch]] = [[] for _ in groups]
        for place, position in self._chosen(groups) if groups else ():
            group, parent = divmod(place, self.first)
            if not 0 <= group < len(groups) or len(found[group]) == self.held_back:
                self._refuse(place, position)
            trajectory = groups[group][parent]
            if not trajectory.counted or not 0 < position < len(trajectory.steps):
                self._refuse(place, position)
            found[group].append(Branch(parent, trajectory.steps[: position + 1], self.compares_keys))
        return [[] if group[0].task_id in self.no_return else branches for group, branches in zip(groups, found)]

    def note(self, played: Iterable[Trajectory]) -> None:
        """Take note of what cannot be returned to, once all episodes of some groups have ended."""
        for trajectory in played:
            if (trajectory.error or "").startswith(NOT_RETURNED):
                if not self.no_return:
                    logger.warning(
                        "task %s is not branched again, nor will others be with which this happens "
                        "(rollout/branch_errors; the command check may find the cause): %s",
                        trajectory.task_id,
                        trajectory.error,
                    )
                self.no_return.add(trajectory.task_id)

    def state_dict(self) -> list[str]:
        """What a checkpoint keeps: of all ranks. Plain data. All ranks call it."""
        return sorted(set(self.gather(sorted(self.no_return))))

    def load_state_dict(self, state: Sequence[str]) -> None:
        """Restore what `state_dict` returned."""
        self.no_return |= set(state)

    def _chosen(self, groups: Sequence[Sequence[Trajectory]]) -> list[tuple[int, int]]:
        """What the rule returned, as plain numbers: numpy's would get into files."""
        chosen = self.choose(groups, self.held_back)
        try:
            return [(index(place), index(position)) for place, position in chosen]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"choose_branches returned {str(chosen)[:200]} ({error}): return pairs of whole numbers, (trajectory, "
                "position)"
            ) from error

    def _refuse(self, place: int, position: int) -> None:
        raise ValueError(
            f"choose_branches returned trajectory {place}, position {position}: name trajectories with a result, "
            f"positions after the first step and before the end, and at most {self.held_back} of a group"
        )


class DeferredEpisodes:
    """Which episodes of a rollout may begin: of each group the first ones, and the others when those have ended.

    Args:
        branching: knows how many are held back, and where they begin.
        episodes: whole groups, one after the other.
        on_end: called with each episode that is over, when it was taken note of.
    """

    def __init__(
        self, branching: Branching, episodes: Sequence[Episode], on_end: Callable[[Episode], None] | None = None
    ):
        self.branching, self.on_end, size = branching, on_end, branching.group_size
        self._groups = [episodes[i : i + size] for i in range(0, len(episodes), size)]
        self._group_of = {e.number: group for group, members in enumerate(self._groups) for e in members}
        self._left = [size] * len(self._groups)
        self._may_begin = [e for members in self._groups for e in members[: branching.first]]

    def take(self) -> list[Episode]:
        """Those that may begin by now. Each is there once."""
        taken, self._may_begin = self._may_begin, []
        return taken

    def ended(self, episode: Episode) -> None:
        """Take note of an episode that is over."""
        group = self._group_of[episode.number]
        members, first = self._groups[group], self.branching.first
        self._left[group] -= 1
        if self._left[group] == 0:
            self.branching.note([member.trajectory() for member in members])
        elif self._left[group] == self.branching.held_back:
            (branches,) = self.branching.branches([[member.trajectory() for member in members[:first]]])
            for member, branch in zip(members[first:], branches):
                member.branch = branch
            self._may_begin += members[first:]
        if self.on_end:
            self.on_end(episode)
