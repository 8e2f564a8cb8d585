"""The order in which a run plays its tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..utils.trl_compat import RepeatSampler


class TaskSampler(RepeatSampler):
    """TRL's order of tasks, but the order of an epoch depends on the seed and the epoch alone.

    TRL draws it from a generator that a resumed run would start anew: the first epoch's order again.
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    @classmethod
    def from_sampler(cls, sampler: RepeatSampler, epoch: Callable[[], int]) -> TaskSampler:
        """TRL's own sampler, with this order."""
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
