"""GRPO ([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)): rewards of episodes compared within the group.

A = A_EP = (R_i - mean R) / std R      over the group's trajectories
"""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph
from .common import episode_advantage


def grpo(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
) -> np.ndarray:
    """Return the advantages of group-relative policy optimization: A = A_EP.

    They are equal for all steps of an episode, except for the penalty. Arguments, shape and errors are those of
    `g2po`.
    """
    return episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
