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

from .graph import StateGraph

EPSILON = 1e-6
# Numbers of a group that differ by less than this share of its largest reward are equal: sums were rounded.
_ROUNDING = 1e-10


def g2po(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
    node_centric: bool = True,
    edge_centric: bool = True,
    aggregate: bool = True,
) -> np.ndarray:
    """Group-graph policy optimization: A = A_EP + w (A_NC + A_EC), with w = `step_weight`.

    Args:
        graph: S steps.
        step_weight: w; 0 is GRPO.
        scale_by_std: divide each term by the sample standard deviation of its set.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format
            (with `episode_statistics="step"`: from its reward and next value).
        episode_statistics: `"trajectory"` (the paper) or `"step"` (the released code), see `episode_advantage`.
        node_centric: include A_NC. `False` is one of the paper's ablations, as for the next two.
        edge_centric: include A_EC.
        aggregate: average values over all visits of a node; `False` uses each step's own return.

    Returns:
        (S,) float64.

    Raises:
        ValueError: for an unknown `episode_statistics`.
    """
    advantage = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    if node_centric:
        advantage = advantage + step_weight * node_advantage(graph, scale_by_std, penalty, aggregate)
    if edge_centric:
        advantage = advantage + step_weight * edge_advantage(graph, scale_by_std, aggregate)
    return advantage


def gigpo(
    graph: StateGraph,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    invalid_action_penalty: float = 0.0,
    episode_statistics: str = "trajectory",
) -> np.ndarray:
    """Group-in-group policy optimization ([arXiv:2505.10978](https://arxiv.org/abs/2505.10978)): A = A_EP + w A_S.

    A_S compares the discounted return gamma^(T-j) R of a step with those of all steps in the same node (the paper's
    anchor state group). Arguments, shape and errors are those of `g2po`. With `episode_statistics="step"`, the penalty
    is also subtracted from the return.
    """
    episode = episode_advantage(graph, scale_by_std, invalid_action_penalty, episode_statistics)
    penalty = invalid_action_penalty if episode_statistics == "step" else 0.0
    returns = graph.returns / graph.gamma - penalty * ~graph.valid
    step = compare(graph, returns, graph.node, scale_by_std, penalty)
    return episode + step_weight * step


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


def rloo(graph: StateGraph, invalid_action_penalty: float = 0.0) -> np.ndarray:
    """REINFORCE leave-one-out: A = R_i - mean of R_k over the group's other trajectories; 0 in a group of one.

    Args:
        graph: S steps.
        invalid_action_penalty: subtracted from the advantage of a step whose completion lacks the required format.

    Returns:
        (S,) float64, not scaled: in units of reward.
    """
    used = graph.trajectory_counted & graph.from_beginning
    size = np.bincount(graph.trajectory_group, used, minlength=graph.num_groups)[graph.trajectory_group]
    total = np.bincount(graph.trajectory_group, graph.rewards * used, minlength=graph.num_groups)
    total = total[graph.trajectory_group]
    others = (total - graph.rewards) / np.maximum(size - 1, 1)
    advantage = np.where(used & (size > 1), graph.rewards - others, 0.0)
    differs = np.abs(advantage) > _ROUNDING * _largest_rewards(graph)[graph.trajectory_group]
    advantage = np.where(differs, advantage, 0.0)[graph.trajectory]
    return np.where(graph.counted, advantage - invalid_action_penalty * ~graph.valid, 0.0)


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


def node_advantage(
    graph: StateGraph, scale_by_std: bool = True, invalid_action_penalty: float = 0.0, aggregate: bool = True
) -> np.ndarray:
    """A_NC = (V(s_{j+1}) - mean) / (std + 1e-6), over the steps taken in the same node.

    V is R at the end of a trajectory. With `aggregate=False`, the return of the next step replaces V. The penalty is
    subtracted from V(s_{j+1}) of a step whose completion lacks the required format.

    Returns:
        (S,) float64; 0 in a node with one step, or with equal next values.
    """
    next_values = graph.next_values if aggregate else graph.next_lambda_returns
    next_values = next_values - invalid_action_penalty * ~graph.valid
    return compare(graph, next_values, graph.node, scale_by_std, invalid_action_penalty)


def edge_advantage(graph: StateGraph, scale_by_std: bool = True, aggregate: bool = True) -> np.ndarray:
    """A_EC = (delta_j - mean) / (std + 1e-6) of delta_j = V(s_{j+1}) - V(s_j), over all steps of the group.

    With `aggregate=False`, the steps' own returns replace V.

    Returns:
        (S,) float64.
    """
    gains = graph.next_values - graph.values if aggregate else graph.next_lambda_returns - graph.lambda_returns
    return compare(graph, gains, graph.group, scale_by_std)


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
