"""GraphGPO ([arXiv:2605.26684](https://arxiv.org/abs/2605.26684)): distances to a success on the group's graph.

    A   = A_EP + w A_D
    A_D = (c_j - mean c) / std c           over steps out of the same node
    c_j = max R * omega^d(s_{j+1})         max R: largest reward of the group; d: `success_distance`

The equations follow `recipe/GraphGPO` of verl-agent.
"""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph
from .common import compare, episode_advantage


def graphgpo(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    omega: float = 0.1,
) -> np.ndarray:
    """Return the advantages of graph-based group policy optimization: A = A_EP + w A_D; A_D is 0 without a success.

    Args:
        graph: S steps.
        step_weight: as in `g2po`.
        scale_by_std: as in `g2po`.
        invalid_action_penalty: as in `g2po`.
        episode_statistics: as in `g2po`.
        omega: discount for each further step to a success, in (0, 1). The authors use 0.1 for ALFWorld, 0.2 for
            WebShop and 0.8 for Sokoban.

    Returns:
        (S,) float64.

    Raises:
        G2POError: if `omega` is out of range or `episode_statistics` is unknown.
    """
    require(0 < omega < 1, "omega", omega, "set it above 0 and below 1")
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    best = np.zeros(graph.num_groups)
    np.maximum.at(best, graph.trajectory_group, graph.rewards)
    closeness = best[graph.group] * omega ** success_distance(graph)[graph.next_node] - penalty * ~graph.valid
    return episode + step_weight * compare(graph, closeness, graph.node, scale_by_std, penalty)


def success_distance(graph: StateGraph) -> np.ndarray:
    """Return the fewest steps from each node to a success (R > 0), over the edges of all trajectories of the group.

    Nodes without a path to a success, and ends of failed trajectories, are one step further than the furthest node
    with a path. In a group without success, all distances are 1.

    Returns:
        (N + M,) float64, nodes and then ends of trajectories.
    """
    distance = np.concatenate([np.full(graph.num_nodes, np.inf), np.where(graph.rewards > 0, 0.0, np.inf)])
    node, next_node = graph.node[graph.counted], graph.next_node[graph.counted]
    level = 0
    while (reached := (distance[next_node] == level) & np.isinf(distance[node])).any():
        level += 1
        distance[node[reached]] = level
    group = np.concatenate([graph.node_group, graph.trajectory_group])
    furthest = np.zeros(graph.num_groups)
    known = np.isfinite(distance)
    np.maximum.at(furthest, group[known], distance[known])
    return np.where(known, distance, furthest[group] + 1)
