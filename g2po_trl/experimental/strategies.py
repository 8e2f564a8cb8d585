"""The rollout strategies by name, and the check of a configuration's strategy. Loads without torch."""

from __future__ import annotations

from typing import Any

from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.strategy import RolloutStrategy, SynchronousRollout
from ..utils.options import check_options, keyword_options
from .partial_rollouts import PartialRollouts

STRATEGIES: dict[str, type[RolloutStrategy]] = {
    "synchronous": SynchronousRollout,
    "dynamic_sampling": DynamicSampling,
    "partial_rollouts": PartialRollouts,
}


def check_strategy(args: Any) -> None:
    """Refuse options that the configured strategy does not have, and settings that it excludes."""
    name, options = args.rollout_strategy, args.rollout_strategy_kwargs or {}
    defaults = keyword_options(STRATEGIES[name])
    check_options("rollout_strategy_kwargs", options, defaults, f"rollout_strategy={name!r}")
    STRATEGIES[name].check(args, **options)
