"""The order in which a run plays its tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..utils.trl_compat import RepeatSampler


class TaskSampler(RepeatSampler):
    """TRL's sampler of tasks, whose order in an epoch depends only on the seed and the epoch.

    TRL draws the order from one generator, which a resumed run would start again with the first epoch's order.
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    @classmethod
    def from_sampler(cls, sampler: RepeatSampler, epoch: Callable[[], int]) -> TaskSampler:
        """Return TRL's sampler with this order."""
        return cls(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            sampler.shuffle,
            sampler.seed,
            epoch=epoch,
        )

    def __iter__(self):
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.epoch())
        return super().__iter__()
