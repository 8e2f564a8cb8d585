"""The episode-level advantage A_EP, and comparisons within a set of steps: shared by the estimators."""

from __future__ import annotations

import numpy as np

from ...utils.options import require
from ..graph import StateGraph

EPSILON = 1e-6
# Numbers of a group that differ by less than this fraction of its largest reward are equal: sums are rounded.
ROUNDING = 1e-10


def episode_advantage(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
) -> np.ndarray:
    """Return A_EP = (R_i - mean R) / (std R + 1e-6), over the trajectories of the group.

    With `episode_statistics="trajectory"`, the penalty is subtracted from the result. With `"step"`, it is subtracted
    from R first, and mean and standard deviation are over all steps of the group, so that long episodes weigh more.

    Args:
        graph: S steps.
        scale_by_std: divide by the standard deviation. `False`: only subtract the mean.
        invalid_action_penalty: the penalty of a step whose completion lacks the required format.
        episode_statistics: `"trajectory"` (the paper) or `"step"` (the released code).

    Returns:
        (S,) float64.

    Raises:
        G2POError: for an unknown `episode_statistics`.
    """
    remedy = "set it to 'trajectory' (the paper: each episode counts once) or 'step' (the released code)"
    require(episode_statistics in ("trajectory", "step"), "episode_statistics", episode_statistics, remedy)
    penalty = invalid_action_penalty * (graph.counted & ~graph.valid)
    rewards = graph.rewards[graph.trajectory]
    if episode_statistics == "step":
        return compare(graph, rewards - penalty, graph.group, scale_by_std, invalid_action_penalty)
    used = graph.trajectory_counted
    mean, std = mean_and_std(graph.rewards[used], graph.trajectory_group[used], graph.num_groups)
    return standardise(graph, rewards, mean[graph.group], std[graph.group], scale_by_std) - penalty


def compare(
    graph: StateGraph,
    values: np.ndarray,
    sets: np.ndarray,
    scale_by_std: bool,
    penalty: float = 0.0,
    ddof: int = 1,
    least_std: float = 0.0,
) -> np.ndarray:
    """Return each step's value, standardised within its set of steps.

    Args:
        graph: S steps.
        values: (S,) one number per step.
        sets: (S,) number of a step's set. A set lies within one group.
        scale_by_std: divide by the standard deviation of the set.
        penalty: number that the caller has subtracted from `values` of invalid steps; sets the scale of rounding
            errors.
        ddof: the standard deviation divides by n - `ddof`.
        least_std: lower bound of the standard deviation, as a fraction of the group's largest reward.

    Returns:
        (S,) float64; 0 in a set of one or of equal values, and in steps that are not counted.
    """
    used = graph.counted
    mean, std = mean_and_std(values[used], sets[used], int(sets.max(initial=0)) + 1, ddof)
    return standardise(graph, values, mean[sets], std[sets], scale_by_std, penalty, least_std)


def mean_and_std(values: np.ndarray, sets: np.ndarray, num_sets: int, ddof: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each set: 0 and 0 for an empty set, deviation 0 for a set of one."""
    size = np.bincount(sets, minlength=num_sets)
    mean = np.bincount(sets, values, minlength=num_sets) / np.maximum(size, 1)
    squares = np.bincount(sets, (values - mean[sets]) ** 2, minlength=num_sets)
    return mean, np.sqrt(squares / np.maximum(size - ddof, 1))


def standardise(
    graph: StateGraph,
    values: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    scale_by_std: bool,
    penalty: float = 0.0,
    least_std: float = 0.0,
) -> np.ndarray:
    """Return (values - mean) / (std + epsilon), all (S,); 0 in sets of equal values and steps that are not counted."""
    largest = largest_rewards(graph)
    differs = std > ROUNDING * (largest + abs(penalty))[graph.group]
    scale = np.maximum(std, least_std * largest[graph.group]) + EPSILON if scale_by_std else 1.0
    return np.where(graph.counted & differs, (values - mean) / scale, 0.0)


def largest_rewards(graph: StateGraph) -> np.ndarray:
    """Return the largest absolute reward of each group, (groups,)."""
    largest = np.zeros(graph.num_groups)
    np.maximum.at(largest, graph.trajectory_group, np.abs(graph.rewards))
    return largest
