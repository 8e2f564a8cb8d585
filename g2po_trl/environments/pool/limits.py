"""Number and limits of environment workers, under the names of their options."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from ...utils.errors import G2POError
from ...utils.options import KINDS, is_of_kind

_WHOLE_NUMBERS = ("num_environment_workers", "environment_worker_resets", "max_observation_characters")
_NEVER_NONE = ("environment_reset_timeout", "environment_step_timeout")


def _limit(default: float | None, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PoolLimits:
    """Number and limits of environment workers.

    Args:
        num_environment_workers: environment processes (per rank). Each runs one reset or step at a time; use more than
            cores if environments wait for something else, such as a network. `None`: one per usable core.
        environment_reset_timeout: seconds after which a reset counts as failed.
        environment_step_timeout: seconds after which a step counts as failed.
        environment_load_timeout: seconds after which importing the environment counts as failed. `None`: as a reset,
            at least 60.
        environment_episode_timeout: maximum seconds of all resets and steps of one episode. `None`: no limit.
        environment_worker_resets: resets after which a worker is replaced, to bound memory leaks. It finishes its
            running episodes while its replacement starts. `None`: never.
        environment_worker_memory_mb: a worker that exceeds this many MiB is replaced; its running episodes are
            replayed in other workers. `None`: never.
        max_observation_characters: a longer observation is an `"invalid"` failure. `None`: no limit.
        environment_variables: names of variables to pass to workers although they look like secrets, such as
            `HF_TOKEN`.

    Raises:
        G2POError: for a value out of range.
    """

    num_environment_workers: int | None = _limit(None, "Environment processes per rank. None: one per core.")
    environment_reset_timeout: float = _limit(120.0, "Seconds a reset may take.")
    environment_step_timeout: float = _limit(60.0, "Seconds a step may take.")
    environment_load_timeout: float | None = _limit(
        None, "Seconds the environment's import may take. None: as a reset, at least 60."
    )
    environment_episode_timeout: float | None = _limit(None, "Seconds an episode may take in all.")
    environment_worker_resets: int | None = _limit(None, "Replace a worker after this many resets.")
    environment_worker_memory_mb: float | None = _limit(None, "Replace a worker above this many MiB.")
    max_observation_characters: int | None = _limit(1_000_000, "Maximum length of an observation.")
    environment_variables: list[str] | None = _limit(None, "Variables to pass although they look like secrets.")

    def __post_init__(self):
        for name in (one.name for one in fields(PoolLimits)):
            value = getattr(self, name)
            if value is None and name not in _NEVER_NONE:
                continue
            if name == "environment_variables":
                if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
                    raise G2POError(f"{name} is {value!r}: set it to a list of names, such as ['HF_TOKEN']")
                continue
            kind = int if name in _WHOLE_NUMBERS else float
            if not is_of_kind(value, kind) or value <= 0:
                unset = "" if name in _NEVER_NONE else ", or to None"
                raise G2POError(f"{name} is {value!r}: set it to a {KINDS[kind]} above 0{unset}")
        if after := getattr(super(), "__post_init__", None):  # of a configuration that inherits the limits
            after()

    @classmethod
    def of(cls, args: Any) -> PoolLimits:
        """Return the limits among the attributes of `args`; missing ones have their defaults."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)})

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
