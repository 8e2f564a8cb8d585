"""Rules that choose the states of a group's graph from which further episodes begin.

A rule is a function `(graph, budget) -> [(trajectory, position), …]`: continue that trajectory from the state in which
it took the step at that position. It may return fewer than `budget` for a group: the others are played from the
beginning. A rule of your own is added to `RULES`.

A state chosen because a step there turned out well is on average not as good as it looks. Visits, and whether a whole
group failed, say little about a single step.
"""

from __future__ import annotations

from collections.abc import Callable

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
        chosen += ((int(graph.trajectory[step]), int(graph.position[step])) for step in steps[order][:budget])
    return chosen


RULES: dict[str, ChooseBranches] = {"least_visited": least_visited}


def all_failed(graph: StateGraph) -> np.ndarray:
    """Return (groups,) bool: groups with counted episodes from the beginning, none of which was a success."""
    used = graph.trajectory_counted & graph.from_beginning
    played = np.bincount(graph.trajectory_group[used], minlength=graph.num_groups)
    won = graph.trajectory_group[used & graph.trajectory_success]
    return (played > 0) & (np.bincount(won, minlength=graph.num_groups) == 0)


def _first_visits(graph: StateGraph, group: int) -> np.ndarray:
    """Return the earliest step of a group's episodes from the beginning in each state but the initial ones."""
    played = graph.counted & graph.from_beginning[graph.trajectory] & (graph.group == group)
    beginnings = np.unique(graph.node[played & (graph.position == 0)])
    steps = np.flatnonzero(played & ~np.isin(graph.node, beginnings))
    steps = steps[np.lexsort((steps, graph.position[steps]))]
    _, first = np.unique(graph.node[steps], return_index=True)
    return np.sort(steps[first])
