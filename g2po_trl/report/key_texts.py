"""An example of what state keys hide: next states of one state and action that differ in value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..credit.graph import StateGraph
from ..trajectory import Trajectory
from ..utils.show import ROOM, different_parts, one_line
from ..view.words import action_text, state_text
from .key_quality import same_actions


def hidden_example(graph: StateGraph, groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any] | None:
    """Return the action of a state whose next states differ most in value, summed over its steps; `None` if none do.

    `next` are pairs of text and value, of the best and the worst next state; `spread`, the sum of squared differences
    from the mean, ranks examples. `graph`: of the groups, with actions.
    """
    trajectories = [one for group in groups for one in group]
    steps = [step for one in trajectories for step in one.steps]
    used, pair = same_actions(graph, groups)
    if not len(used):
        return None
    values = graph.next_values[used]
    means = np.bincount(pair, values) / np.bincount(pair)
    spread = np.bincount(pair, (values - means[pair]) ** 2)
    worst = int(spread.argmax())
    if spread[worst] <= 1e-9:
        return None
    inside = used[pair == worst]
    order = inside[np.argsort(-graph.next_values[inside], kind="stable")]
    first, ends = steps[int(inside[0])], []
    for index in (int(order[0]), int(order[-1])):
        episode = trajectories[graph.trajectory[index]]
        is_last = graph.next_node[index] >= graph.num_nodes
        end = f"the end: {episode.final_observation or episode.outcome}"
        ends.append((end if is_last else state_text(steps[index + 1]), float(graph.next_values[index])))
    return {
        "state": _short(state_text(first)),
        "action": _short(action_text(first)),
        "next": [[said, value] for (said, value), said in zip(ends, different_parts(ends[0][0], ends[1][0]))],
        "spread": float(spread[worst]),
    }


def text(found: dict[str, Any] | None) -> list[str]:
    """Return a line about the example, if there is one."""
    if found is None:
        return []
    (best, high), (worst, low) = found["next"]
    ends = f"{best!r} (value {high:.2g}) and to {worst!r} (value {low:.2g})"
    return [f"from {found['state']!r}, {found['action']!r} leads to {ends}"]


def _short(words: str) -> str:
    return one_line(words, 2 * ROOM)
