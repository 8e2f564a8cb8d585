"""HGPO ([arXiv:2602.22817](https://arxiv.org/abs/2602.22817)): returns compared within the same history.

    A   = sum_k w_k A_k                    k = 0 to `history_length`; no A_EP
    A_k = (G_j - mean G) / std G           over steps in the same node whose k previous nodes are also the same
    w_k ~ (k + 1)^alpha                    sums to 1 over the comparisons in which a step takes part
    G_j = gamma^(T-j) R

A_0 is GiGPO's A_S. A set of one, or of equal returns, does not count as a comparison. Standard deviations are divided
by n. The equations follow `recipe/hgpo` of verl-agent.
"""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph
from .common import compare


def hgpo(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    history_length: int = 2,
    depth_exponent: float = 1.0,
) -> np.ndarray:
    """Return the advantages of hierarchy-of-groups policy optimization: A = sum_k w_k A_k.

    Args:
        graph: S steps.
        scale_by_std: divide each comparison by its standard deviation.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format.
        history_length: largest k; the number of past steps in a prompt.
        depth_exponent: alpha. 0 weighs all comparisons equally; larger values favour long common histories.

    Returns:
        (S,) float64.

    Raises:
        G2POError: if `depth_exponent` is negative.
    """
    require(depth_exponent >= 0, "depth_exponent", depth_exponent, "set it to 0 or more")
    returns = graph.returns / graph.gamma
    context = np.maximum(graph.node, 0)
    total, weights = np.zeros(graph.num_steps), np.zeros(graph.num_steps)
    for depth in range(history_length + 1):
        if depth > 0:  # number the pairs (context of the previous step, node)
            before = np.append(-1, context[:-1])[: graph.num_steps]
            # Steps with fewer previous ones are alone.
            before = np.where(graph.position >= depth, before, graph.num_steps + np.arange(graph.num_steps))
            context = np.unique(before * (graph.num_nodes + 1) + graph.node, return_inverse=True)[1].reshape(-1)
        part = compare(graph, returns, context, scale_by_std, ddof=0)
        # Not `part != 0`: a step at the mean of its set is compared, too.
        compared = np.bincount(context, part != 0)[context] > 0
        total += (depth + 1) ** depth_exponent * part
        weights += (depth + 1) ** depth_exponent * compared
    advantage = total / np.where(weights > 0, weights, 1.0)
    return np.where(graph.counted, advantage - invalid_action_penalty * ~graph.valid, 0.0)
