"""HGPO: comparisons of steps with the same history, weighted by its length."""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph
from .common import compare


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
