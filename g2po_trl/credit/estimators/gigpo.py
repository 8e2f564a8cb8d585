"""GiGPO ([arXiv:2505.10978](https://arxiv.org/abs/2505.10978)): returns compared within a state.

A   = A_EP + w A_S
A_S = (G_j - mean G) / std G      over steps in the same node (the paper's anchor state group)
G_j = gamma^(T-j) R               discounted return of step j
"""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph
from .common import compare, episode_advantage


def gigpo(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
) -> np.ndarray:
    """Return the advantages of group-in-group policy optimization: A = A_EP + w A_S.

    Arguments, shape and errors are those of `g2po`. With `episode_statistics="step"`, the penalty is also subtracted
    from the return.
    """
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    returns = graph.returns / graph.gamma - penalty * ~graph.valid
    step = compare(graph, returns, graph.node, scale_by_std, penalty)
    return episode + step_weight * step
