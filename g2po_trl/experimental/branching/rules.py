"""Rules that choose the states of a group's graph from which further episodes begin.

A rule is a function `(graph, budget) -> [(trajectory, position), …]`: continue that trajectory from the state in which
it took the step at that position. It may return fewer than `budget` for a group: the others are played from the
beginning. A rule of your own is added to `RULES`.

A state chosen because a step there turned out well is on average not as good as it looks. Visits, and whether a whole
group failed, say little about a single step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

import numpy as np

from ...credit.graph import StateGraph

Branches = list[tuple[int, int]]
ChooseBranches = Callable[[StateGraph, int], Branches]


def least_visited(graph: StateGraph, budget: int) -> Branches:
    """Choose the least visited states, the earliest first, of groups in which every episode failed.

    Elsewhere nothing: episodes from the beginning teach as fast there (benchmarks/results/finished).

    Args:
        graph: of the episodes so far.
        budget: branches of a group, at most.

    Returns:
        (trajectory, position) of each branch, at most one a state.
    """
    chosen: Branches = []
    for group in np.flatnonzero(all_failed(graph)):
        steps = _first_visits(graph, group)
        order = np.lexsort((steps, graph.position[steps], graph.node_visits[graph.node[steps]]))
        chosen += _points(graph, steps[order][:budget])
    return chosen


def uniform(graph: StateGraph, budget: int, seed: int = 0) -> Branches:
    """Choose states of every group at random, with equal probability. See `least_visited`."""
    draws, chosen = _draws(graph, seed), []
    for group in range(graph.num_groups):
        steps = _first_visits(graph, group)
        chosen += _points(graph, draws.permutation(steps)[:budget])
    return chosen


def highest_spread(graph: StateGraph, budget: int) -> Branches:
    """Choose the states of every group with the largest standard error of their returns. See `least_visited`."""
    used = graph.counted
    mean = np.bincount(graph.node[used], graph.returns[used], minlength=graph.num_nodes) / graph.node_visits
    squares = (graph.returns[used] - mean[graph.node[used]]) ** 2
    spread = np.sqrt(np.bincount(graph.node[used], squares, minlength=graph.num_nodes)) / graph.node_visits
    rounding = 1e-9 * np.abs(graph.rewards).max(initial=0.0)  # of sums of equal returns
    chosen: Branches = []
    for group in range(graph.num_groups):
        steps = _first_visits(graph, group)
        steps = steps[spread[graph.node[steps]] > rounding]
        order = np.lexsort((steps, -spread[graph.node[steps]]))
        chosen += _points(graph, steps[order][:budget])
    return chosen


def last_steps(graph: StateGraph, budget: int, number: int = 3, seed: int = 0) -> Branches:
    """Choose states of every group at random from the last `number` steps of episodes. See `least_visited`."""
    draws, chosen = _draws(graph, seed), []
    left = graph.lengths[graph.trajectory] - graph.position
    for group in range(graph.num_groups):
        steps = np.flatnonzero(_may_branch(graph, group) & (left <= number))
        _, first = np.unique(graph.node[steps], return_index=True)
        chosen += _points(graph, draws.permutation(steps[np.sort(first)])[:budget])
    return chosen


RULES: dict[str, ChooseBranches] = {
    "least_visited": least_visited,
    "uniform": uniform,
    "highest_spread": highest_spread,
    "last_steps": last_steps,
}


def all_failed(graph: StateGraph) -> np.ndarray:
    """Return (groups,) bool: groups with counted episodes from the beginning, none of which was a success."""
    used = graph.trajectory_counted & graph.from_beginning
    played = np.bincount(graph.trajectory_group[used], minlength=graph.num_groups)
    won = graph.trajectory_group[used & graph.trajectory_success]
    return (played > 0) & (np.bincount(won, minlength=graph.num_groups) == 0)


def _draws(graph: StateGraph, seed: int) -> np.random.Generator:
    """Return a generator seeded by the graph, so that a rule chooses the same for the same graph."""
    return np.random.default_rng([seed, crc32(graph.node.tobytes()), crc32(graph.returns.tobytes())])


def _may_branch(graph: StateGraph, group: int) -> np.ndarray:
    """Return (S,) bool: steps of a group's episodes from the beginning, without their initial states."""
    steps = graph.counted & graph.from_beginning[graph.trajectory] & (graph.group == group)
    beginnings = np.unique(graph.node[steps & (graph.position == 0)])
    return steps & ~np.isin(graph.node, beginnings)


def _first_visits(graph: StateGraph, group: int) -> np.ndarray:
    """Return the earliest step in each state that may be branched from."""
    steps = np.flatnonzero(_may_branch(graph, group))
    steps = steps[np.lexsort((steps, graph.position[steps]))]
    _, first = np.unique(graph.node[steps], return_index=True)
    return np.sort(steps[first])


def _points(graph: StateGraph, steps: np.ndarray) -> Iterator[tuple[int, int]]:
    return ((int(graph.trajectory[step]), int(graph.position[step])) for step in steps)
