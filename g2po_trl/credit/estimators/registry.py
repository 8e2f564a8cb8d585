"""The built-in estimators by name. The signature of an estimator's function is the list of its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...trajectory import Step, Trajectory
from ...utils.options import check_options
from ..graph import StateGraph
from .crbc import crbc
from .g2po import ABLATIONS, g2po
from .gigpo import gigpo
from .graphgpo import graphgpo
from .grpo import grpo
from .hgpo import hgpo
from .rewardflow import rewardflow
from .rloo import rloo

ESTIMATORS: dict[str, Callable[..., np.ndarray]] = {
    "g2po": g2po,
    "gigpo": gigpo,
    "grpo": grpo,
    "rloo": rloo,
    "graphgpo": graphgpo,
    "hgpo": hgpo,
    "crbc": crbc,
    "rewardflow": rewardflow,
}
COMPARE_EPISODES = frozenset({"grpo", "rloo"})  # keys of states make no difference to them
USE_NODE_VALUES = frozenset({"g2po"})  # `value_lambda` makes no difference to others
# Parameters that are settings of a run, not options of an estimator -> the field of `G2POConfig`.
RUN_SETTINGS = {
    "step_weight": "step_advantage_weight",
    "scale_by_std": "scale_rewards",
    "invalid_action_penalty": "invalid_action_penalty",
    "history_length": "history_length",
}


def estimator_options(name: str) -> dict[str, Any]:
    """Return the options of an estimator with their defaults: its parameters without the graph and `RUN_SETTINGS`."""
    graph, *parameters = inspect.signature(ESTIMATORS[name]).parameters.values()
    return {one.name: one.default for one in parameters if one.name not in RUN_SETTINGS}


def make_estimator(
    name: str, estimator_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> partial[np.ndarray]:
    """Return the estimator with its options bound: `StateGraph -> (S,)` advantages.

    Args:
        name: key of `ESTIMATORS`.
        estimator_kwargs: options, see `estimator_options`.
        settings: values of `RUN_SETTINGS`. Ignored if the estimator has no such parameter.

    Raises:
        ValueError: for an unknown option, or a value that the estimator refuses.
    """
    function = ESTIMATORS[name]
    _check_options(name, estimator_kwargs or {})
    parameters = inspect.signature(function).parameters
    used = {setting: value for setting, value in settings.items() if setting in parameters}
    return partial(function, **used, **(estimator_kwargs or {}))


def compares_steps(name: str, estimator_kwargs: Mapping[str, Any] | None = None, step_weight: float = 1.0) -> bool:
    """Return whether the estimator compares steps. `False`: whole episodes only."""
    options = {**estimator_options(name), **(estimator_kwargs or {})}
    weighted = "step_weight" in inspect.signature(ESTIMATORS[name]).parameters
    weight = step_weight if weighted else options.get("value_weight", 1.0)
    terms = options.get("node_centric", True) or options.get("edge_centric", True)
    return name not in COMPARE_EPISODES and weight != 0 and terms


def estimator_name(name: str, estimator_kwargs: Mapping[str, Any] | None = None, value_lambda: float = 1.0) -> str:
    """Return the estimator's name in tables: `g2po`, `g2po without A_EC`, `g2po, value_lambda 0.5`."""
    missing = [term for option, term in ABLATIONS.items() if (estimator_kwargs or {}).get(option, True) is False]
    without = f" without {' and '.join(missing)}" if missing else ""
    return name + without + (f", value_lambda {value_lambda}" if value_lambda != 1 else "")


def _check_options(name: str, kwargs: Mapping[str, Any]) -> None:
    for option in kwargs:
        if option in RUN_SETTINGS:
            raise ValueError(f"estimator_kwargs has {option!r}: set {RUN_SETTINGS[option]} instead")
    check_options("estimator_kwargs", kwargs, estimator_options(name), f"advantage_estimator={name!r}")
    if kwargs:
        try:
            ESTIMATORS[name](_ONE_STEP, **kwargs)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"estimator_kwargs has a value that {name} refuses: {error}") from error


_ONE_STEP = StateGraph.from_groups([[Trajectory("task", [Step("state", "action")], 1.0, "success")]])
