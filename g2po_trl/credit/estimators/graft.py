"""GRAFT ([arXiv:2609.28963](https://arxiv.org/abs/2609.28963)): advantages over several hops, within a state.

    A     = (E_j - mean E) / std E              over steps in the same node; E_j / |E_j| of a single step   eq. 11
    E_j   = d_j + sum_k (gamma gae_lambda)^k D_k(s_{j+1})               k = 1 … T - j + 1                   eq. 9
    D_k   = mean of d over the edges that are reachable in exactly k hops on the graph                      eq. 10
    d_j   = gamma V(s_{j+1}) - V(s_j)                                                                       eq. 8
    V(s)  = gamma mean V(s')                    over the group's transitions from s; V = R at the end       eq. 5

There is no A_EP. Edges are distinct pairs of a node and a next node; ends with equal rewards are one. The paper says
both "the set of all directed edges" and "all raw edge instances": averaged over visits every D_k would be 0, since by
eq. 5 the d of a node's visits add up to 0. That reading is `gae_lambda=0`. The paper does not specify the divisor of
the standard deviation; it is n - 1 here, as in G2PO. The paper's objective has one importance ratio per step, which is
`importance_sampling_level="sequence"`.
"""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph
from ..values import lambda_values
from .common import EPSILON, ROUNDING, compare, largest_rewards


def graft(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> np.ndarray:
    """Return the advantages of graph-based faithful step-level credit assignment.

    Args:
        graph: S steps. Its values and its discount are not used.
        scale_by_std: divide by the standard deviation of the node's steps, or by the size of a single one.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format.
        gamma: discount, in (0, 1).
        gae_lambda: weight of further hops, in [0, 1]. The authors use 0.95 for ALFWorld, 0.8 for WebShop.

    Returns:
        (S,) float64.

    Raises:
        G2POError: if `gamma` or `gae_lambda` is out of range.
    """
    require(0 < gamma < 1, "gamma", gamma, "set it above 0 and below 1")
    require(0 <= gae_lambda <= 1, "gae_lambda", gae_lambda, "set it to a number of 0 to 1")
    used = graph.counted
    fixed_point = lambda_values(graph.node[used], graph.next_node[used], graph.rewards, graph.node_group, gamma, 0.0)
    values = np.concatenate([fixed_point, graph.rewards])
    gains = np.where(used, gamma * values[graph.next_node] - values[graph.node], 0.0)
    credit = gains + hops(graph, gains, gamma * gae_lambda)

    alone = used & (graph.node_visits[graph.node] == 1) if graph.num_nodes else used
    known = alone & (np.abs(credit) > ROUNDING * largest_rewards(graph)[graph.group])
    single = np.where(known, credit / (np.abs(credit) + EPSILON if scale_by_std else 1.0), 0.0)
    advantage = np.where(alone, single, compare(graph, credit, graph.node, scale_by_std))
    return advantage - invalid_action_penalty * (used & ~graph.valid)


def hops(graph: StateGraph, gains: np.ndarray, weight: float) -> np.ndarray:
    """Return sum_k weight^k D_k(s_{j+1}) of each step, (S,): mean gains of the edges that can follow it.

    Args:
        graph: S steps.
        gains: (S,) d_j.
        weight: gamma gae_lambda.
    """
    total, inner = np.zeros(graph.num_steps), graph.next_node < graph.num_nodes
    left = graph.lengths[graph.trajectory] - graph.position  # T - j + 1
    _, end = np.unique(graph.rewards, return_inverse=True)
    for group in range(graph.num_groups):
        steps = np.flatnonzero(graph.counted & (graph.group == group))
        onward = steps[inner[steps]]
        if not len(onward):
            continue
        first, size = graph.node[steps].min(), int(np.ptp(graph.node[steps])) + 1
        node, then = graph.node - first, graph.next_node - first
        target = np.where(inner, then, size + end[graph.trajectory])
        _, edges = np.unique(np.column_stack([node, target])[steps], axis=0, return_index=True)
        edges = steps[edges]
        number, sums = np.bincount(node[edges], minlength=size), np.bincount(node[edges], gains[edges], size)
        adjacent = np.zeros((size, size), dtype=np.float32)
        adjacent[node[onward], then[onward]] = 1
        reached = np.eye(size, dtype=np.float32)  # [s, s']: s' is k - 1 hops behind s
        for k in range(1, left[onward].max() + 1):
            among = reached @ number
            mean = np.divide(reached @ sums, among, out=np.zeros(size), where=among > 0)
            these = onward[left[onward] >= k]
            total[these] += weight**k * mean[then[these]]
            reached = (reached @ adjacent > 0).astype(np.float32)
            if weight**k < ROUNDING or not reached.any():
                break
    return total
