"""CRBC ([arXiv:2609.35082](https://arxiv.org/abs/2609.35082)): next values compared within a state.

Values are those of the fixed point, and the standard deviation is bounded.

    A    = A_EP + w A_V
    A_V  = (V(s_{j+1}) - mean V) / max(std V, least_std max R)      over steps out of the same node
    V(s) = gamma mean V(s')      over the group's transitions from s; V = R at the end of a trajectory

A_V is G2PO's A_NC with other values, a standard deviation divided by n with a lower bound, and another weight.
"""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph
from ..values import lambda_values
from .common import compare, episode_advantage


def crbc(
    graph: StateGraph,
    value_weight: float = 5.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    gamma: float = 0.98,
    least_std: float = 0.01,
) -> np.ndarray:
    """Return the advantages of CRBC: A = A_EP + w A_V.

    Args:
        graph: S steps. Its values and its discount are not used.
        value_weight: w.
        scale_by_std: as in `g2po`.
        invalid_action_penalty: as in `g2po`.
        episode_statistics: as in `g2po`.
        gamma: discount of the values.
        least_std: lower bound of the standard deviation, as a fraction of the group's largest reward. The default is
            g2po-trl's; the authors' value is not published.

    Returns:
        (S,) float64.

    Raises:
        G2POError: if `value_weight`, `gamma` or `least_std` is out of range or `episode_statistics` is unknown.
    """
    require(value_weight >= 0, "value_weight", value_weight, "set it to 0 or more")
    require(least_std >= 0, "least_std", least_std, "set it to 0 or more")
    require(0 < gamma <= 1, "gamma", gamma, "set it above 0 and at most 1")
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    used = graph.counted
    fixed_point = lambda_values(graph.node[used], graph.next_node[used], graph.rewards, graph.node_group, gamma, 0.0)
    values = np.concatenate([fixed_point, graph.rewards])
    next_values = np.where(used, values[graph.next_node], 0.0) - penalty * ~graph.valid
    step = compare(graph, next_values, graph.node, scale_by_std, penalty, ddof=0, least_std=least_std)
    return episode + value_weight * step
