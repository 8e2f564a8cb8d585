"""The estimators: one row each. Help texts, exports, refusals and pages read the rows, and options the signatures.

To add an estimator, add a file NAME.py with a function NAME here, and a row. Reading the rows imports nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...utils.options import check_options, require

if TYPE_CHECKING:
    import numpy as np

# Parameters that are settings of a run, not options of an estimator -> the field of `G2POConfig`.
RUN_SETTINGS = {
    "step_weight": "step_advantage_weight",
    "scale_by_std": "scale_rewards",
    "invalid_action_penalty": "invalid_action_penalty",
    "history_length": "history_length",
}


@dataclass(frozen=True)
class Estimator:
    """An estimator.

    Args:
        name: name of its module in this package, of the function in it, and of the estimator in configurations.
        about: the quantity that it compares, in a few words.
        paper: arXiv number; `None` if there is none.
        compares: "steps", or whole "episodes", for which state keys make no difference.
        uses_gamma: whether the graph's discount makes a difference. Otherwise it has none, or an option of its own.
        uses_value_lambda: whether `value_lambda` makes a difference.
        ablations: option -> the term that is missing if it is `False`, for names in tables.
    """

    name: str
    about: str
    paper: str | None = None
    compares: str = "steps"
    uses_gamma: bool = False
    uses_value_lambda: bool = False
    ablations: Mapping[str, str] | None = None

    @property
    def function(self) -> Callable[..., np.ndarray]:
        """`(graph, **options) -> (S,)`."""
        return getattr(import_module(f".{self.name}", __package__), self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the function after the graph, with their defaults."""
        _, *parameters = inspect.signature(self.function).parameters.values()
        return {one.name: one.default for one in parameters}

    @property
    def options(self) -> dict[str, Any]:
        """`parameters` without `RUN_SETTINGS`: what `estimator_kwargs` may set."""
        return {name: default for name, default in self.parameters.items() if name not in RUN_SETTINGS}


_G2PO_TERMS = {"node_centric": "A_NC", "edge_centric": "A_EC", "aggregate": "group aggregation"}
ESTIMATORS = {
    row.name: row
    for row in (
        Estimator("g2po", "values of next states, and their changes", "2606.22995", "steps", True, True, _G2PO_TERMS),
        Estimator("gigpo", "returns from the same state", "2505.10978", uses_gamma=True),
        Estimator("grpo", "rewards of whole episodes", "2402.03300", "episodes"),
        Estimator("rloo", "rewards with those of the other episodes, never scaled", "2402.14740", "episodes"),
        Estimator("graphgpo", "distances to a success", "2605.26684"),
        Estimator("hgpo", "returns after the same history", "2602.22817", uses_gamma=True),
        Estimator("crbc", "next values from the fixed point, weighted 5", "2609.35082"),
        Estimator("graft", "advantages over several hops, without rewards of episodes", "2609.28963"),
        Estimator("graphhca", "ratios of success probabilities", "2609.35084"),
        Estimator("rewardflow", "rewards propagated along shortest paths", "2603.18859"),
    )
}


def make_estimator(
    name: str, estimator_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> partial[np.ndarray]:
    """Return the estimator with its options bound: `StateGraph -> (S,)` advantages.

    `estimator_kwargs` are `Estimator.options`; `G2POError` for an unknown one, or a value that the estimator refuses.
    `settings` are values of `RUN_SETTINGS`, ignored if the estimator has no such parameter.
    """
    from ...trajectory import Step, Trajectory
    from ..graph import StateGraph

    row, kwargs = ESTIMATORS[name], estimator_kwargs or {}
    fields = [RUN_SETTINGS[option] for option in RUN_SETTINGS.keys() & kwargs]
    require(not fields, "estimator_kwargs", kwargs, f"set {', '.join(fields)} instead")
    check_options("estimator_kwargs", kwargs, row.options, f"advantage_estimator={name!r}")
    used = {setting: value for setting, value in settings.items() if setting in row.parameters}
    estimator = partial(row.function, **used, **kwargs)
    if kwargs:  # refused now, not after the first rollout
        estimator(StateGraph.from_groups([[Trajectory("task", [Step("state", "action")], 1.0, "success")]]))
    return estimator


def row_of(name: str) -> Estimator | None:
    """Return the estimator of a name that `estimator_name` wrote; `None` for a user's function, or a critic."""
    return ESTIMATORS.get(name.split(" ")[0].rstrip(","))


def compares_steps(name: str, estimator_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether the estimator compares steps. `False`: whole episodes only."""
    options = {**ESTIMATORS[name].options, **(estimator_kwargs or {})}
    terms = options.get("node_centric", True) or options.get("edge_centric", True)
    return ESTIMATORS[name].compares == "steps" and options.get("value_weight", 1.0) != 0 and terms


def estimator_name(name: str, estimator_kwargs: Mapping[str, Any] | None = None, value_lambda: float = 1.0) -> str:
    """Return the estimator's name in tables: `g2po`, `g2po without A_EC`, `g2po, value_lambda 0.5`."""
    terms = (ESTIMATORS[name].ablations or {}).items() if name in ESTIMATORS else ()
    missing = [term for option, term in terms if (estimator_kwargs or {}).get(option, True) is False]
    without = f" without {' and '.join(missing)}" if missing else ""
    return name + without + (f", value_lambda {value_lambda}" if value_lambda != 1 else "")
