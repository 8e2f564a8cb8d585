"""Advantages on the state graph: pure functions `StateGraph -> array(num_steps)`.

    G2PO     A = A_EP + w (A_NC + A_EC)
    GiGPO    A = A_EP + w A_S
    GRPO     A = A_EP
    RLOO     A = R - mean reward of the group's other trajectories

A_EP compares an episode with the others of its group, A_NC an edge with the other edges out of the same node, A_EC the
progress of an edge with that of all edges of the group. Each is a set of numbers, centred, and divided by their sample
standard deviation (n - 1) when `scale_by_std`. A set of one, or of equal values, has nothing to say: advantage 0.

Two conventions. `episode_statistics="trajectory"`, the default, are the papers' equations: each episode counts once. A
step whose reply had not the required format then pays `invalid_action_penalty` off its advantage. The papers do not
say where it goes; off the advantage it stays what it is, where off the score it would be divided by the deviation of a
group that may differ in nothing else, and grow a hundredfold.

`episode_statistics="step"` with a penalty of 0.1 gives exactly what the released code of G2PO computes: the mean and
deviation of A_EP run over steps, so a long episode weighs more, and the penalty is taken off the step's score in A_EP
and off the value of the node it led to in A_NC.

V are the values of the graph: mean returns, the papers' V, unless it was made with a `value_lambda` below 1.

Steps of trajectories with outcome `"error"` or `"lost"` have advantage 0 and enter no set. Branches have no A_EP and
are in none of its sets: they were not drawn from the beginning.
"""

from __future__ import annotations

import numpy as np

from ..graph import StateGraph

EPSILON = 1e-6
# Numbers of a group that differ by less than this share of its largest reward are equal: sums were rounded.
_ROUNDING = 1e-10


def episode_advantage(
    graph: StateGraph,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
) -> np.ndarray:
    """A_EP = (R_i - mean R) / (std R + 1e-6), over the trajectories of the group.

    With `episode_statistics="trajectory"`, the penalty is subtracted from the result. With `"step"`, it is subtracted
    from R first, and mean and standard deviation are over all steps of the group, so that long episodes weigh more.

    Returns:
        (S,) float64.

    Raises:
        ValueError: for an unknown `episode_statistics`.
    """
    penalty = invalid_action_penalty * (graph.counted & ~graph.valid)
    rewards, whole = graph.rewards[graph.trajectory], graph.from_beginning[graph.trajectory]
    if episode_statistics == "step":
        sets = np.where(whole, graph.group, graph.num_groups)  # what branches would be compared with is not used
        return whole * compare(graph, rewards - penalty, sets, scale_by_std, invalid_action_penalty)
    if episode_statistics != "trajectory":
        raise ValueError(
            f"episode_statistics is {episode_statistics!r}; set it to 'trajectory' (the paper: each episode counts "
            "once) or 'step' (the released code: each step counts once)"
        )
    used = graph.trajectory_counted & graph.from_beginning
    mean, std = mean_and_std(graph.rewards[used], graph.trajectory_group[used], graph.num_groups)
    return whole * standardise(graph, rewards, mean[graph.group], std[graph.group], scale_by_std) - penalty


def compare(
    graph: StateGraph,
    values: np.ndarray,
    sets: np.ndarray,
    scale_by_std: bool,
    penalty: float = 0.0,
    ddof: int = 1,
    least_std: float = 0.0,
) -> np.ndarray:
    """Standardise each step's value within its set of steps; `sets` numbers them, each within one group.

    `ddof`: 1 for the sample deviation, 0 for that of the set itself. `least_std`: a share of the group's largest
    reward; smaller deviations count as this.
    """
    used = graph.counted
    mean, std = mean_and_std(values[used], sets[used], int(sets.max(initial=0)) + 1, ddof)
    return standardise(graph, values, mean[sets], std[sets], scale_by_std, penalty, least_std)


def mean_and_std(values: np.ndarray, sets: np.ndarray, num_sets: int, ddof: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each set; 0 for an empty set, deviation 0 for a set of one."""
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
    """(values - mean) / (std + epsilon), all (S,); 0 where the set has no spread and in `error` trajectories."""
    largest = _largest_rewards(graph)
    spread = std > _ROUNDING * (largest + abs(penalty))[graph.group]
    scale = np.maximum(std, least_std * largest[graph.group]) + EPSILON if scale_by_std else 1.0
    return np.where(graph.counted & spread, (values - mean) / scale, 0.0)


def _largest_rewards(graph: StateGraph) -> np.ndarray:
    """(groups,) largest reward of each, whatever its sign."""
    largest = np.zeros(graph.num_groups)
    np.maximum.at(largest, graph.trajectory_group, np.abs(graph.rewards))
    return largest
