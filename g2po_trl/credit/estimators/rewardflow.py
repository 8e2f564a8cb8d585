"""RewardFlow ([arXiv:2603.18859](https://arxiv.org/abs/2603.18859)): rewards propagated back over the group's graph.

    A    = A_EP + w A_F
    A_F  = (r_j - mean r) / std r          over steps out of the same node
    r_j  = V(s_{j+1}) - V(s_j)             V(s): `propagated_rewards`

V(s_j) is the same for all steps out of a node, so only V(s_{j+1}) makes a difference. The end of a trajectory is a
node of its own.
"""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph
from .common import compare, episode_advantage


def rewardflow(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    decay: float = 0.9,
) -> np.ndarray:
    """Return the advantages of RewardFlow: A = A_EP + w A_F; A_F is 0 if all rewards are 0.

    Args:
        graph: S steps.
        step_weight: weight w of A_F.
        scale_by_std: divide by standard deviations.
        invalid_action_penalty: see `episode_advantage`.
        episode_statistics: see `episode_advantage`.
        decay: discount for each further step to a reward, in (0, 1). The authors use 0.9 for ALFWorld.

    Returns:
        (S,) float64.

    Raises:
        G2POError: if `decay` is out of range or `episode_statistics` is unknown.
    """
    require(0 < decay < 1, "decay", decay, "set it above 0 and below 1")
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    gains = propagated_rewards(graph, decay)[graph.next_node] - penalty * ~graph.valid
    return episode + step_weight * compare(graph, gains, graph.node, scale_by_std, penalty)


def propagated_rewards(graph: StateGraph, decay: float) -> np.ndarray:
    """Return V(s) = max over trajectory ends e of decay^d(s, e) R(e), with d the fewest steps from s to e.

    Paths follow the edges of all trajectories of the group. V of a node is at least 0, its own reward; V of an end is
    its reward, also if that is negative.

    Returns:
        (N + M,) float64, nodes and then ends of trajectories.
    """
    values = np.concatenate([np.zeros(graph.num_nodes), graph.rewards])
    node, next_node = graph.node[graph.counted], graph.next_node[graph.counted]
    while True:
        improved = values.copy()
        np.maximum.at(improved, node, decay * values[next_node])
        if np.array_equal(improved, values):
            return values
        values = improved
