"""GraphHCA ([arXiv:2609.35084](https://arxiv.org/abs/2609.35084)): ratios of success probabilities, within a state.

    A      = A_EP + w A_H                                             eq. 12
    A_H    = (l_j - mean l) / std l     over steps in the same node   eq. 11
    l_j    = Psi(s_{j+1}) - Psi(s_j)                                  eq. 10
    Psi(s) = log max(Phi(s), floor)                                   eq. 5
    Phi(s) = gamma mean Phi(s')         over the group's transitions from s   eq. 9

Phi is 1 at the end of a success, and 0 at other ends. Psi(s_j) is the same for all steps in a node, so only the next
state makes a difference. The paper does not specify the divisor of its standard deviation; it is n - 1 here, as in
G2PO.
"""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph
from ..values import lambda_values
from .common import compare, episode_advantage


def graphhca(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    gamma: float = 0.95,
    floor: float = 0.01,
) -> np.ndarray:
    """Return the advantages of graph-based hindsight credit assignment: A = A_EP + w A_H.

    Args:
        graph: S steps. Its values and its discount are not used.
        step_weight: weight w of A_H.
        scale_by_std: as in `g2po`.
        invalid_action_penalty: as in `g2po`; with `episode_statistics="step"` also subtracted from l_j.
        episode_statistics: as in `g2po`.
        gamma: discount of Phi, in (0, 1).
        floor: lower bound of Phi, in (0, 1).

    Returns:
        (S,) float64.

    Raises:
        G2POError: if `gamma` or `floor` is out of range or `episode_statistics` is unknown.
    """
    for name, value in (("gamma", gamma), ("floor", floor)):
        require(0 < value < 1, name, value, "set it above 0 and below 1")
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    used, won = graph.counted, (graph.trajectory_success & graph.trajectory_counted).astype(float)
    success = lambda_values(graph.node[used], graph.next_node[used], won, graph.node_group, gamma, 0.0)
    potential = np.log(np.maximum(np.concatenate([success, won]), floor))
    credit = np.where(used, potential[graph.next_node] - potential[graph.node], 0.0) - penalty * ~graph.valid
    return episode + step_weight * compare(graph, credit, graph.node, scale_by_std, penalty)
