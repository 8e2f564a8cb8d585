"""Credit: the trajectories of a group in, one advantage per step out.

State keys → `StateGraph` → values of its nodes → advantages (`estimators`). Needs numpy, xxhash and `Trajectory` only,
so that any framework can use it (docs/elsewhere.md).
"""

from importlib import import_module
from typing import Any

from .estimators.registry import ESTIMATORS

_MODULE_OF = {
    "StateGraph": "graph",
    "TrajectoryRecord": "graph",
    "NormalisedKey": "state_keys",
    "spread_over_tokens": "interop",
    "step_advantages": "interop",
    "episode_advantage": "estimators.common",
    "edge_advantage": "estimators.g2po",
    "node_advantage": "estimators.g2po",
    **{name: f"estimators.{name}" for name in ESTIMATORS},
}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value
