"""The order in which a run plays its tasks."""

from __future__ import annotations

from collections.abc import Callable

from ..utils.trl_compat import RepeatSampler


class TaskSampler(RepeatSampler):
    """TRL's sampler of tasks, whose order in an epoch depends only on the seed and the epoch.

    TRL draws the order from one generator, which a resumed run would start again with the first epoch's order.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        vars(self).update(vars(sampler), epoch=epoch)

    def __iter__(self):
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.epoch())
        return super().__iter__()
