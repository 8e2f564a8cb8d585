"""Dynamic sampling: groups whose episodes all have the same reward are replaced by groups of other tasks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from ..engines.sampling import derived_seed
from ..environments.tasks import task_id_of
from ..utils.options import require
from .strategy import Rollout, RolloutContext, Row, SynchronousRollout


class DynamicSampling(SynchronousRollout):
    """Plays further groups until the rewards of every group differ, or a budget of groups is spent.

    This is the dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476), with a bounded number of groups.

    Args:
        context: the parts of the run. Other tasks are drawn from its `tasks`, in an order that follows from its `seed`
            and the iteration, without those that the player excludes.
        max_generation_batches: maximum number of groups played, as a multiple of those trained on.
    """

    def __init__(self, context: RolloutContext, *, max_generation_batches: int = 2):
        super().__init__(context)
        self.max_generation_batches = max_generation_batches

    @classmethod
    def check(cls, args: Any, max_generation_batches: int = 2) -> None:
        remedy = "set it to 2 or more, or rollout_strategy to 'synchronous'"
        require(max_generation_batches >= 2, "max_generation_batches", max_generation_batches, remedy)

    def collect(self, rows: Sequence[Row], groups: Sequence[int], iteration: int) -> Rollout:
        """Play this rank's `rows`, whose groups may have members on other ranks.

        A group that is played again keeps the newest of its tasks, even if its rewards are equal too.
        """
        rollout, gather = super().collect(rows, groups, iteration), self.context.gather
        others = self._other_tasks(gather([task_id_of(row) for row in rows]), iteration)
        left, time = (self.max_generation_batches - 1) * len(set(gather(list(groups)))), 0
        while left > 0:
            paid = [(group, one.reward if one.counted else None) for group, one in zip(groups, rollout.trajectories)]
            again = equal_reward_groups(gather(paid))[:left]
            if not again:
                break
            left -= len(again)
            task_of = dict(zip(again, others))
            again = [group for group in again if group in task_of]
            if not again:  # no other task is left
                break
            places = [place for place, group in enumerate(groups) if group in task_of]
            own = [groups[place] for place in places]
            new, stats = self.context.play([task_of[group] for group in own], own)
            rollout.stats = rollout.stats.and_then(stats)
            rollout.replaced += [rollout.trajectories[place] for place in places]
            time += 1
            rollout.replaced_groups += [(time, group) for group in own]
            for place, trajectory in zip(places, new):
                rollout.trajectories[place] = trajectory
        return rollout

    def _other_tasks(self, names: Iterable[str], iteration: int) -> Iterable[Row]:
        """Yield each task that is not among `names` once, in an order of this iteration."""
        tasks, excluded, names = self.context.tasks, self.context.player.excluded, set(names)
        draws = random.Random(derived_seed(self.context.seed, iteration))
        for place in draws.sample(range(len(tasks)), len(tasks)):
            row = tasks[place]
            if task_id_of(row) not in names and task_id_of(row) not in excluded:
                yield row


def equal_reward_groups(rewards: Iterable[tuple[int, float | None]]) -> list[int]:
    """Return the groups whose rewards are all equal, in order, from (group, reward or `None`: no result) pairs."""
    of_group: dict[int, set[float]] = {}
    for group, reward in rewards:
        of_group.setdefault(group, set()).update([] if reward is None else [reward])
    return sorted(group for group, values in of_group.items() if len(values) < 2)
