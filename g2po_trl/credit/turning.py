"""The turning point of an episode: the step with the largest loss of value."""

from __future__ import annotations

import numpy as np

from .graph import StateGraph

_ROUNDING = 1e-6


def turning_steps(graph: StateGraph) -> np.ndarray:
    """Return the position of each trajectory's turning point, (M,): the step with the largest fall of V.

    The last step of an episode that the turn limit ended leads to its reward, mostly 0: this fall may be the largest.
    -1: V never falls, as in a group in which all rewards are 0, or the trajectory is not counted.
    """
    falls, found = graph.values - graph.next_values, np.full(len(graph.lengths), -1)
    for m, (end, length) in enumerate(zip(np.cumsum(graph.lengths), graph.lengths)):
        mine = falls[end - length : end]
        if length and mine.max() > _ROUNDING:
            found[m] = mine.argmax()
    return found
