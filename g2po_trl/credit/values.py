"""Values of the nodes: lambda-returns made consistent over a group's graph.

    G_j = γ [(1 − λ) V(s_{j+1}) + λ G_{j+1}]      V(s) = mean of G over the visits of s      V = G = R at the end

λ = 1 is the paper: G is the discounted return, V its mean (Monte Carlo). λ = 0 is the fixed point of the group's
transitions, V(s) = γ · mean V(s'), to which batch TD(0) converges (the certainty-equivalence estimate): a state
visited once takes over the value of the state that followed, which may have been visited twenty times. In between,
returns that followed have weight λ, which protects against state keys that hide relevant differences.

The equations of each group are solved, not learned over time. Small groups are solved by elimination, many at a time.
Large groups are solved by sweeps, whose time grows with the steps instead of the cube of the nodes; or by elimination
if sweeps would take longer, as in long episodes with loops and little discount.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Number of nodes from which sweeps are faster (measured), and maximum number of coefficients in memory (128 MB);
# larger groups are only swept.
_LARGE = 250
_COEFFICIENTS = 16_000_000
# Cost of a numpy call, and of elimination per cubed node, in units of a sweep's cost per step (measured).
_CALL, _CUBE = 150, 1 / 300
# Sweeps end when no value changes by more than this fraction of the largest reward. Smaller weights are left out.
_NEGLIGIBLE = 1e-14


def lambda_values(
    node: np.ndarray,
    next_node: np.ndarray,
    rewards: np.ndarray,
    node_group: np.ndarray,
    gamma: float,
    value_lambda: float,
) -> np.ndarray:
    """Return the values of all nodes for λ < 1.

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
    worth = np.concatenate([np.zeros(len(node_group)), rewards])
    step_group = node_group[node]
    nodes = np.bincount(node_group)
    visited = np.bincount(step_group, minlength=len(nodes)) > 0
    large = visited & (nodes > _LARGE)
    for groups in _batches(nodes * (visited & ~large)):
        chosen = np.zeros(len(nodes), dtype=bool)
        chosen[groups] = True
        of_batch = chosen[step_group]
        _eliminate(worth, node[of_batch], next_node[of_batch], node_group, groups, gamma, value_lambda)
    if large.any():
        of_large = large[step_group]
        solvable = nodes**2 <= _COEFFICIENTS
        slow = _sweep(worth, node[of_large], next_node[of_large], node_group, solvable, gamma, value_lambda)
        for group in slow:
            of_group = step_group == group
            _eliminate(worth, node[of_group], next_node[of_group], node_group, np.array([group]), gamma, value_lambda)
    return worth[: len(node_group)]


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
    for steps in _from_the_end(last) if value_lambda else []:
        returns[steps] += gamma * value_lambda * returns[steps + 1]
    return returns


def _from_the_end(last: np.ndarray) -> list[np.ndarray]:
    """Return, for k = 1, 2, …, the indices of the k-th steps before the last ones."""
    ends = np.flatnonzero(last)
    before = np.diff(ends, prepend=-1) - 1  # steps of each trajectory before its last
    return [(ends - k)[before >= k] for k in range(1, before.max(initial=0) + 1)]


def _batches(nodes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield batches of groups with similar numbers of nodes, since a batch is padded to its largest group."""
    order = np.argsort(nodes, kind="stable")[::-1]
    order = order[nodes[order] > 0]
    while len(order):
        width = int(nodes[order[0]])
        alike = int((2 * nodes[order] >= width).sum())
        count = max(1, min(alike, _COEFFICIENTS // width**2))
        yield np.sort(order[:count])
        order = order[count:]


def _eliminate(worth, node, next_node, node_group, groups, gamma, value_lambda) -> None:
    """Solve the equations of `groups`, in place, by elimination.

    With G_j = Σ_k γ (γλ)^k (1 − λ) V(s_{j+1+k}) + γ (γλ)^(T−j) R, each later state has a coefficient.
    """
    num_nodes = len(node_group)
    number_of = np.full(node_group[-1] + 1, -1)
    number_of[groups] = np.arange(len(groups))
    number, column = number_of[node_group], np.zeros(num_nodes, dtype=np.int64)
    mine = number >= 0
    sizes = np.bincount(number[mine])
    column[mine] = np.arange(mine.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    width = int(sizes.max())

    row = number[node] * width + column[node]
    size = len(groups) * width
    ends = np.flatnonzero(next_node >= num_nodes)
    left = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(node))  # steps that follow
    shares = gamma * (gamma * value_lambda) ** np.arange(left.max() + 1)
    constant = np.bincount(row, shares[left] * worth[next_node[np.arange(len(node)) + left]], minlength=size)

    # Steps with more successors come first: the first `count[k]` have a state k steps later.
    order = np.argsort(-left, kind="stable")
    count = np.searchsorted(-left[order], -np.arange(len(shares)))
    count = count[: np.count_nonzero((shares > _NEGLIGIBLE) & (count > 0))]
    first, column_of_next = row[order] * width, column[np.minimum(next_node, num_nodes - 1)]
    coefficients = np.zeros(size * width)
    for some in _runs(count):  # in parts: long episodes have many
        place = np.concatenate([first[: count[k]] + column_of_next[order[: count[k]] + k] for k in some])
        coefficients += np.bincount(place, np.repeat((1 - value_lambda) * shares[some], count[some]), size * width)
    visits = np.bincount(row, minlength=size)
    system = np.diag(np.ones(width)) * np.maximum(visits, 1).reshape(-1, width, 1)
    system -= coefficients.reshape(-1, width, width)
    solved = np.linalg.solve(system, constant.reshape(-1, width, 1))
    worth[:num_nodes][mine] = solved[number[mine], column[mine], 0]


def _runs(count: np.ndarray) -> list[np.ndarray]:
    """Return the indices of `count` in runs whose counts add up to about `_COEFFICIENTS` at most."""
    if not len(count):
        return []
    return np.split(np.arange(len(count)), np.flatnonzero(np.diff(np.cumsum(count) // _COEFFICIENTS)) + 1)


def _sweep(worth, node, next_node, node_group, solvable, gamma, value_lambda) -> list[int]:
    """Solve the equations by iteration, in place. It converges for gamma = 1, too: every state leads to an end.

    Returns:
        The `solvable` groups for which elimination is faster. Their values are unfinished.
    """
    num_nodes = len(node_group)
    numbers, node = np.unique(node, return_inverse=True)
    group = node_group[numbers]
    visits = np.bincount(node)
    last = next_node >= num_nodes
    # The value of a state visited once equals its lambda-return: a chain of such states takes one sweep.
    visits_of_next = np.bincount(numbers, visits, minlength=num_nodes)[np.minimum(next_node, num_nodes - 1)]
    own = gamma * np.where(last, 0.0, np.where(visits_of_next == 1, 1.0, value_lambda))
    share = gamma - own
    earlier = [steps[own[steps] > 0] for steps in _from_the_end(last)]
    earlier = [steps for steps in earlier if len(steps)]
    enough = _NEGLIGIBLE * np.abs(worth[next_node[last]]).max()
    worthwhile = _CUBE * (np.bincount(group).astype(float) ** 3).sum() / (len(node) + _CALL * len(earlier))
    sweeps, change = 0, np.full(1, np.inf)
    while change.max() > enough:
        slow = np.unique(group[change > enough]) if sweeps > worthwhile else group[:0]
        if len(slow) and solvable[slow].all():
            return slow.tolist()
        returns = share * worth[next_node]
        for steps in earlier:
            returns[steps] += own[steps] * returns[steps + 1]
        values = np.bincount(node, returns) / visits
        change = np.abs(values - worth[numbers])
        worth[numbers] = values
        sweeps += 1
    return []
