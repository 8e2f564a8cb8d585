"""Values of the nodes: lambda-returns made consistent over a group's graph.

    G_j = γ [(1 − λ) V(s_{j+1}) + λ G_{j+1}]      V(s) = mean of G over the visits of s      V = G = R at the end

λ = 1 is the paper: G is the discounted return, V its mean (Monte Carlo). λ = 0 is the fixed point of the group's
transitions, V(s) = γ · mean V(s'), to which batch TD(0) converges (the certainty-equivalence estimate): a state
visited once takes over the value of the state that followed, which may have been visited twenty times. In between,
returns that followed have weight λ, which protects against state keys that hide relevant differences.
"""

from __future__ import annotations

import numpy as np

_COEFFICIENTS = 16_000_000  # of groups solved together: 128 MB
_NEGLIGIBLE = 1e-14  # weights


def lambda_values(
    node: np.ndarray,
    next_node: np.ndarray,
    rewards: np.ndarray,
    node_group: np.ndarray,
    gamma: float,
    value_lambda: float,
) -> np.ndarray:
    """Return the values of all nodes for λ < 1: the equations of each group are solved by elimination.

    Shapes: S steps, ordered by group, trajectory and position; N nodes; M trajectories.

    Args:
        node: (S,) node of a step.
        next_node: (S,) node it led to; N + m for the end of trajectory m.
        rewards: (M,) R.
        node_group: (N,) group of a node, not decreasing; groups share no node.
        gamma: discount, in (0, 1].
        value_lambda: λ, in [0, 1].

    Returns:
        (N,) float64.
    """
    num_nodes, values = len(node_group), np.zeros(len(node_group))
    step_group, nodes = node_group[node], np.bincount(node_group)
    together = max(1, _COEFFICIENTS // int(nodes.max(initial=1)) ** 2)  # groups, as wide as the widest
    for first in range(0, len(nodes), together):
        some = (first <= step_group) & (step_group < first + together)
        wanted = slice(*np.searchsorted(node_group, [first, first + together]))
        width = int(nodes[first : first + together].max())
        if not width:
            continue
        number = node_group[wanted] - first
        row = number * width + np.arange(len(number)) - np.searchsorted(number, number)  # of each node
        own, then = row[node[some] - wanted.start], next_node[some]
        # G of a step is linear in the values of its group's nodes, the columns, and in a constant, the last column.
        last = then >= num_nodes
        column = np.where(last, width, row[np.where(last, 0, then - wanted.start)] % width)
        share = gamma * np.where(last, rewards[np.where(last, then - num_nodes, 0)], 1 - value_lambda)
        sums = np.zeros((number.max(initial=-1) + 1) * width * (width + 1))
        ends = np.flatnonzero(last)
        left = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(own))  # steps that follow
        for ahead in range(left.max(initial=-1) + 1):
            weight, steps = (gamma * value_lambda) ** ahead, np.flatnonzero(left >= ahead)
            if weight < _NEGLIGIBLE:
                break
            np.add.at(sums, own[steps] * (width + 1) + column[steps + ahead], weight * share[steps + ahead])
        sums = sums.reshape(-1, width, width + 1)
        visits = np.maximum(np.bincount(own, minlength=len(sums) * width), 1).reshape(-1, width, 1)
        solved = np.linalg.solve(np.eye(width) * visits - sums[:, :, :-1], sums[:, :, -1:])
        values[wanted] = solved.reshape(-1)[row]
    return values


def lambda_returns(next_values: np.ndarray, last: np.ndarray, gamma: float, value_lambda: float) -> np.ndarray:
    """Return the lambda-return G of each step.

    Args:
        next_values: (S,) V(s_{j+1}), or R for a last step; ordered by trajectory and position.
        last: (S,) bool, the last step of each trajectory.
        gamma: γ.
        value_lambda: λ.

    Returns:
        (S,) float64.
    """
    returns = gamma * np.where(last, 1.0, 1.0 - value_lambda) * next_values
    ends = np.flatnonzero(last)
    before = np.diff(ends, prepend=-1) - 1  # steps of each trajectory before its last
    for k in range(1, before.max(initial=0) + 1 if value_lambda else 0):
        steps = (ends - k)[before >= k]
        returns[steps] += gamma * value_lambda * returns[steps + 1]
    return returns
