"""CRBC: values of states as a baseline, with a lower bound of the deviation."""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph
from ..values import lambda_values
from .common import compare, episode_advantage


def crbc(
    graph: StateGraph,
    step_weight: float = 5.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    gamma: float = 0.98,
    least_std: float = 0.01,
) -> np.ndarray:
    """CRBC: A = A_EP + w A_V, where A_V compares V(s_{j+1}) over all steps taken in the same node.

    V is the fixed point V(s) = gamma mean V(s') of the group's transitions, with V = R at the end of a trajectory; the
    graph's own values are not used. A_V differs from A_NC in these values, in the standard deviation (divided by n,
    and at least `least_std`) and in the weight.

    Args:
        graph: S steps. Its discount is not used.
        step_weight, scale_by_std, invalid_action_penalty, episode_statistics: as in `g2po`.
        gamma: discount of the values.
        least_std: minimum standard deviation, as a fraction of the group's largest reward. The authors' value is not
            known; this one was chosen here.

    Returns:
        (S,) float64.

    Raises:
        ValueError: for an unknown `episode_statistics`.
    """
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    used = graph.counted
    fixed_point = lambda_values(graph.node[used], graph.next_node[used], graph.rewards, graph.node_group, gamma, 0.0)
    values = np.concatenate([fixed_point, graph.rewards])
    next_values = np.where(used, values[graph.next_node], 0.0) - penalty * ~graph.valid
    step = compare(graph, next_values, graph.node, scale_by_std, penalty, ddof=0, least_std=least_std)
    return episode + step_weight * step
