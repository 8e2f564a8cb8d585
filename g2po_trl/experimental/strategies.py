"""The rollout strategies by name, and the check of a configuration's strategy. Loads without torch."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.strategy import RolloutStrategy, SynchronousRollout
from ..utils.options import check_options
from .partial_rollouts import PartialRollouts

STRATEGIES: dict[str, type[RolloutStrategy]] = {
    "synchronous": SynchronousRollout,
    "dynamic_sampling": DynamicSampling,
    "partial_rollouts": PartialRollouts,
}


def check_strategy(args: Any) -> None:
    """Refuse an unknown rollout strategy, options that it does not have, and settings that it excludes."""
    name, options = args.rollout_strategy, args.rollout_strategy_kwargs or {}
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"rollout_strategy is {name!r}: choose one of {', '.join(STRATEGIES)}")
    parameters = signature(STRATEGIES[name]).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.kind is Parameter.KEYWORD_ONLY}
    check_options("rollout_strategy_kwargs", options, defaults, f"rollout_strategy={name!r}")
    STRATEGIES[name].check(args, **options)
