"""Credit: the trajectories of a group in, one advantage per step out.

State keys → `StateGraph` → values of its nodes → advantages (`estimators`). Needs numpy, xxhash and `Trajectory` only,
so that any framework can use it (docs/elsewhere.md).
"""

from .estimators.common import episode_advantage
from .estimators.crbc import crbc
from .estimators.g2po import edge_advantage, g2po, node_advantage
from .estimators.gigpo import gigpo
from .estimators.graphgpo import graphgpo
from .estimators.grpo import grpo
from .estimators.hgpo import hgpo
from .estimators.rloo import rloo
from .graph import StateGraph, TrajectoryRecord
from .interop import spread_over_tokens, step_advantages
from .state_keys import NormalisedKey

__all__ = [
    "NormalisedKey",
    "StateGraph",
    "TrajectoryRecord",
    "crbc",
    "edge_advantage",
    "episode_advantage",
    "g2po",
    "gigpo",
    "graphgpo",
    "grpo",
    "hgpo",
    "node_advantage",
    "rloo",
    "spread_over_tokens",
    "step_advantages",
]
