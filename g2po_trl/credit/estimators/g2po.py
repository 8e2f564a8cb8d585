"""G2PO ([arXiv:2606.22995](https://arxiv.org/abs/2606.22995)): node- and edge-centric advantages on the state graph.

A    = A_EP + w (A_NC + A_EC)
A_EP = (R_i - mean R) / std R                       over the group's trajectories      `common.episode_advantage`
A_NC = (V(s_{j+1}) - mean V) / std V                over steps out of the same node    `node_advantage`
A_EC = (delta_j - mean delta) / std delta           over all steps of the group        `edge_advantage`
       delta_j = V(s_{j+1}) - V(s_j)
V(s) = mean of gamma^(T-j+1) R over the visits of s, and R at the end of a trajectory  `StateGraph.node_values`
"""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph
from .common import compare, episode_advantage


def g2po(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    node_centric: bool = True,
    edge_centric: bool = True,
    aggregate: bool = True,
) -> np.ndarray:
    """Return the advantages of group-graph policy optimization: A = A_EP + w (A_NC + A_EC).

    Args:
        graph: S steps.
        step_weight: weight w of A_NC and A_EC; with 0, the advantages equal `grpo`'s.
        scale_by_std: divide each term by the sample standard deviation (n - 1) of its set, plus 1e-6.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format;
            with `episode_statistics="step"` from its R_i and V(s_{j+1}) instead.
        episode_statistics: `"trajectory"` (the paper) or `"step"` (the released code), see `episode_advantage`.
        node_centric: include A_NC.
        edge_centric: include A_EC.
        aggregate: average values over all visits of a node. `False` uses each step's own return.

    Returns:
        (S,) float64.

    Raises:
        G2POError: for an unknown `episode_statistics`.
    """
    options = scale_by_std, invalid_action_penalty, episode_statistics, node_centric, edge_centric, aggregate
    advantage, *others = g2po_terms(graph, *options).values()
    for term in others:
        advantage = advantage + step_weight * term
    return advantage


def g2po_terms(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    node_centric: bool = True,
    edge_centric: bool = True,
    aggregate: bool = True,
) -> dict[str, np.ndarray]:
    """Return A_EP, A_NC and A_EC as "episode", "node" and "edge", each (S,); arguments as in `g2po`."""
    terms = {"episode": episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)}
    if node_centric:
        penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
        terms["node"] = node_advantage(graph, scale_by_std, penalty, aggregate)
    if edge_centric:
        terms["edge"] = edge_advantage(graph, scale_by_std, aggregate)
    return terms


def node_advantage(
    graph: StateGraph, scale_by_std: bool = True, invalid_action_penalty: float = 0.0, aggregate: bool = True
) -> np.ndarray:
    """Return A_NC = (V(s_{j+1}) - mean) / (std + 1e-6), over the steps taken in the same node.

    V is R at the end of a trajectory.

    Args:
        graph: S steps.
        scale_by_std: divide by the standard deviation of the node's steps. `False`: only subtract the mean.
        invalid_action_penalty: subtracted from V(s_{j+1}) of a step whose completion lacks the required format.
        aggregate: `False` replaces V by the return of the next step.

    Returns:
        (S,) float64; 0 in a node with one step, or with equal next values.
    """
    next_values = graph.next_values if aggregate else graph.next_lambda_returns
    next_values = next_values - invalid_action_penalty * ~graph.valid
    return compare(graph, next_values, graph.node, scale_by_std, penalty=invalid_action_penalty)


def edge_advantage(graph: StateGraph, scale_by_std: bool = True, aggregate: bool = True) -> np.ndarray:
    """Return A_EC = (delta_j - mean) / (std + 1e-6), over all steps of the group.

    delta_j = V(s_{j+1}) - V(s_j) is the progress of step j.

    Args:
        graph: S steps.
        scale_by_std: divide by the standard deviation of the group's steps. `False`: only subtract the mean.
        aggregate: `False` replaces V by the steps' own returns.

    Returns:
        (S,) float64.
    """
    deltas = graph.next_values - graph.values if aggregate else graph.next_lambda_returns - graph.lambda_returns
    return compare(graph, deltas, graph.group, scale_by_std)
