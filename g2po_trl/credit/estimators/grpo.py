"""GRPO: one advantage an episode, its reward against the group's."""

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
    """Group-relative policy optimization: A = A_EP, equal for all steps of an episode except for the penalty.

    Arguments, shape and errors are those of `g2po`.
    """
    return episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
