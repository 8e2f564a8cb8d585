"""Examples of what state keys hide: different observations, or next states, of one key."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..credit.graph import StateGraph
from ..trajectory import Trajectory
from ..utils.show import ROOM, different_parts, one_line
from ..view.words import action_text, state_text
from .key_quality import same_actions


def merged_texts(groups: Iterable[Sequence[Trajectory]]) -> dict[str, Any]:
    """Return the share of steps in a state of their group that has several observations, and an example.

    The `example` has most steps, and is two texts, or `None`. The listed actions are not compared.
    """
    merged, steps = [], 0
    for group in groups:
        texts = defaultdict(Counter)
        for step in (step for one in group if one.counted for step in one.steps):
            texts[step.key][state_text(step)] += 1
            steps += 1
        merged += [seen for seen in texts.values() if len(seen) > 1]
    most = max(merged, key=Counter.total, default=Counter())
    example = different_parts(*(text for text, _ in most.most_common(2))) if most else None
    return {"share": sum(map(Counter.total, merged)) / steps if steps else 0.0, "example": example}


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


def text(merged: dict[str, Any], hidden: dict[str, Any] | None) -> list[str]:
    """Return lines about both."""
    lines = []
    if merged["example"]:
        shown = " and ".join(map(repr, merged["example"]))
        lines.append(f"{merged['share']:.0%} of steps are in a state that has several observations, as {shown}")
    if hidden is not None:
        (best, high), (worst, low) = hidden["next"]
        ends = f"{best!r} (value {high:.2g}) and to {worst!r} (value {low:.2g})"
        lines.append(f"from {hidden['state']!r}, {hidden['action']!r} leads to {ends}")
    return lines


def _short(words: str) -> str:
    return one_line(words, 2 * ROOM)
