"""Estimators of other papers on the same graph: pure functions `StateGraph -> array(num_steps)`.

    GraphGPO   A = A_EP + w A_D      which way out of a node is closest to a success
    HGPO       A = sum_k w_k A_k     returns, compared among steps that share the node and k nodes before it
    CRBC       A = A_EP + 5 A_V      next values, as A_NC, where a node's value is the fixed point of the transitions

Options default to their authors'. A set of one, or of equal values, gives 0, steps of `error` and `lost` trajectories
are in no set, and an invalid reply pays its penalty, all as in `advantages`. Where paper, released code and this
module differ is in docs/differences.md.
"""

from __future__ import annotations

import numpy as np

from .advantages import compare, episode_advantage
from .graph import StateGraph
from .values import lambda_values


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


def hgpo(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    history: int = 2,
    depth_exponent: float = 1.0,
) -> np.ndarray:
    """Hierarchy-of-groups policy optimization ([arXiv:2602.22817](https://arxiv.org/abs/2602.22817)): A = sum_k w_k
    A_k.

    A_k compares the discounted return gamma^(T-j) R of a step with those of all steps in the same node whose k
    previous nodes are also the same, for k = 0 (GiGPO's A_S) to `history`. w_k is proportional to (k +
    1)^`depth_exponent` and sums to 1 over the comparisons in which a step takes part; a set of one, or of equal
    returns, is no comparison. There is no A_EP. Standard deviations are divided by n. Read in `recipe/hgpo` of
    verl-agent.

    Args:
        graph: S steps.
        scale_by_std: divide each comparison by its standard deviation.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format.
        history: largest k; the number of past steps in a prompt.
        depth_exponent: 0 weighs all comparisons equally.

    Returns:
        (S,) float64.
    """
    returns = graph.returns / graph.gamma
    context = np.maximum(graph.node, 0)
    total, weights = np.zeros(graph.num_steps), np.zeros(graph.num_steps)
    # A branch's first step comes after its parent's.
    number = graph.position + graph.trajectory_start[graph.trajectory]
    parent = graph.trajectory_parent[graph.trajectory]
    first = np.cumsum(graph.lengths) - graph.lengths
    previous = np.where((graph.position == 0) & (parent >= 0), first[parent] + number, np.arange(graph.num_steps)) - 1
    for depth in range(history + 1):
        if depth > 0:  # number the pairs (context of the step before, node); a step without so many before is alone
            alone = graph.num_steps + np.arange(graph.num_steps)
            before = np.where(number >= depth, context[previous], alone)
            context = np.unique(before * (graph.num_nodes + 1) + graph.node, return_inverse=True)[1].reshape(-1)
        part = compare(graph, returns, context, scale_by_std, ddof=0)
        # Not `part != 0`: a step at its set's mean is in the comparison, and rounding may not decide whether.
        compared = np.bincount(context, part != 0)[context] > 0
        total += (depth + 1) ** depth_exponent * part
        weights += (depth + 1) ** depth_exponent * compared
    advantage = total / np.where(weights > 0, weights, 1.0)
    return np.where(graph.counted, advantage - invalid_action_penalty * ~graph.valid, 0.0)


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
