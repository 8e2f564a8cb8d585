"""GraphGPO: distances to a success on the group's graph."""

from __future__ import annotations

import numpy as np

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
    """Graph-based group policy optimization ([arXiv:2605.26684](https://arxiv.org/abs/2605.26684)): A = A_EP + w A_D.

    A_D compares R omega^d(s_{j+1}) over all steps taken in the same node. R is the largest reward of the group; d is
    the distance to a success, see `success_distance`. In a group without success, A_D is 0. Read in `recipe/GraphGPO`
    of verl-agent.

    Args:
        graph: S steps.
        step_weight, scale_by_std, invalid_action_penalty, episode_statistics: as in `g2po`.
        omega: discount for each further step to a success, in (0, 1). The authors use 0.1 for ALFWorld, 0.2 for
            WebShop and 0.8 for Sokoban.

    Returns:
        (S,) float64.

    Raises:
        ValueError: for an unknown `episode_statistics`.
    """
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    best = np.zeros(graph.num_groups)
    np.maximum.at(best, graph.trajectory_group, graph.rewards)
    closeness = best[graph.group] * omega ** success_distance(graph)[graph.next_node] - penalty * ~graph.valid
    return episode + step_weight * compare(graph, closeness, graph.node, scale_by_std, penalty)


def success_distance(graph: StateGraph) -> np.ndarray:
    """Fewest steps from a node to a success (R > 0) in the group's graph, over the edges of all its trajectories.

    A node without a path to a success, and the end of a failed trajectory, are one step further than the furthest node
    with one. In a group without success, all distances are 1.

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
