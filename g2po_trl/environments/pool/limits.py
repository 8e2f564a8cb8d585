"""Number and limits of environment workers, under the names of their options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from ...utils.options import Options, option

_limit = partial(option, group="Environment workers and errors", resumable=True, plays=True)


@dataclass
class PoolLimits(Options):
    """Number and limits of environment workers.

    Raises:
        G2POError: for a value out of range.
    """

    num_environment_workers: int | None = _limit(
        "Environment processes (per rank). Each runs one reset or step at a time; use more than cores if environments "
        "wait for something else, such as a network. `None`: one per usable core.",
        None,
        within="[1, inf)",
        plays=False,
    )
    environment_reset_timeout: float = _limit("Seconds after which a reset is an error.", 120.0, within="(0, inf)")
    environment_step_timeout: float = _limit("Seconds after which a step is an error.", 60.0, within="(0, inf)")
    environment_load_timeout: float | None = _limit(
        "Seconds after which importing the environment is an error. `None`: as a reset, at least 60.",
        None,
        within="(0, inf)",
    )
    environment_worker_resets: int | None = _limit(
        "Resets after which a worker is replaced, to bound memory leaks. `None`: never.", None, within="[1, inf)"
    )
    environment_worker_memory_mb: float | None = _limit(
        "MiB of memory above which a worker is replaced; its episodes are replayed in others. `None`: never.",
        None,
        within="(0, inf)",
    )
    max_observation_characters: int | None = _limit(
        "Maximum characters of an observation; more is an error. `None`: no limit.", 1_000_000, within="[1, inf)"
    )
    max_observation_images: int | None = _limit(
        "Maximum images of an observation; more is an error.", 8, within="[0, inf)"
    )
    max_image_pixels: int | None = _limit(
        "Maximum pixels of an image; more is an error.", 2048 * 2048, within="[1, inf)"
    )
    environment_variables: list[str] | None = _limit(
        "Variables to pass to workers, in addition to those that programs need, such as `HF_TOKEN`.", None
    )

    @property
    def workers(self) -> int:
        """Number of processes."""
        return usable_cores() if self.num_environment_workers is None else self.num_environment_workers

    @property
    def load_timeout(self) -> float:
        """Seconds for importing the environment."""
        return self.environment_load_timeout or max(60.0, self.environment_reset_timeout)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
