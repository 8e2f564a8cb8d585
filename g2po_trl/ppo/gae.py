"""Generalised advantage estimation, for an actor with a critic (PPO)."""

from __future__ import annotations

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Return generalised advantage estimates over the turns of episodes (Schulman et al., 2016).

    Args:
        rewards: (S,) reward of each step, ordered by trajectory and position.
        values: (S,) value of each step's prompt.
        lengths: (M,) steps of each trajectory; they sum to S.
        gamma: discount.
        lam: λ.

    Returns:
        (S,) A_j = sum_k (gamma lam)^k delta_{j+k} within the step's trajectory.
    """
    advantages, ends = np.zeros(len(rewards)), np.cumsum(lengths)
    following, next_values = np.zeros(len(lengths)), np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):  # the last step of every trajectory, the one before, …
        here = np.flatnonzero(lengths >= back)
        step = ends[here] - back
        delta = rewards[step] + gamma * next_values[here] - values[step]
        following[here] = advantages[step] = delta + gamma * lam * following[here]
        next_values[here] = values[step]
    return advantages


def whiten(advantages: np.ndarray, used: np.ndarray) -> np.ndarray:
    """(advantages - mean) / (std + 1e-8) over the used steps; 0 where they have no spread."""
    if used.sum() < 2:
        return np.zeros_like(advantages)
    mean, std = advantages[used].mean(), advantages[used].std(ddof=1)
    return (advantages - mean) / (std + 1e-8)
