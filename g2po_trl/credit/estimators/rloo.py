"""RLOO ([arXiv:2402.14740](https://arxiv.org/abs/2402.14740)): rewards compared with those of the other episodes.

A = R_i - mean of R_k over the group's other trajectories (k != i)
"""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph
from .common import ROUNDING, largest_rewards


def rloo(graph: StateGraph, invalid_action_penalty: float = 0.0) -> np.ndarray:
    """Return the advantages of REINFORCE leave-one-out: A = R_i - mean of R_k over k != i; 0 in a group of one.

    Args:
        graph: S steps.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format.

    Returns:
        (S,) float64 in units of reward: never scaled.
    """
    used = graph.trajectory_counted
    size = np.bincount(graph.trajectory_group, used, minlength=graph.num_groups)[graph.trajectory_group]
    total = np.bincount(graph.trajectory_group, graph.rewards * used, minlength=graph.num_groups)
    total = total[graph.trajectory_group]
    others = (total - graph.rewards) / np.maximum(size - 1, 1)
    advantage = np.where(used & (size > 1), graph.rewards - others, 0.0)
    differs = np.abs(advantage) > ROUNDING * largest_rewards(graph)[graph.trajectory_group]
    advantage = np.where(differs, advantage, 0.0)[graph.trajectory]
    return np.where(graph.counted, advantage - invalid_action_penalty * ~graph.valid, 0.0)
