"""State keys compared with texts: different observations under one key, and equal ones under several."""

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


def key_texts(groups: Iterable[Sequence[Trajectory]]) -> dict[str, Any]:
    """Return the part `key_texts` of analysis.json.

    Returns:
        `steps`: number of steps. `merged`: `steps` in a state of their group that has several observations, and the
        `example` with most steps, two texts. `split`: `steps` whose observation has several keys in their group, and
        the `example`, a text. Examples are `None` if there are none. The listed actions are not compared.
    """
    found = {"steps": 0, "merged": {"steps": 0, "example": None}, "split": {"steps": 0, "example": None}}
    most = {"merged": 0, "split": 0}
    for group in groups:
        of_key, of_text = defaultdict(Counter), defaultdict(Counter)
        for step in (step for one in group if one.counted for step in one.steps):
            seen = state_text(step)
            of_key[step.key][seen] += 1
            of_text[seen][step.key] += 1
            found["steps"] += 1
        for name, counters in (("merged", of_key), ("split", of_text)):
            for key, inside in counters.items():
                if len(inside) < 2:
                    continue
                found[name]["steps"] += inside.total()
                if inside.total() > most[name]:
                    most[name] = inside.total()
                    (first, _), (second, _) = inside.most_common(2)
                    found[name]["example"] = different_parts(first, second) if name == "merged" else _short(key)
    return found


def hidden_example(graph: StateGraph, groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any] | None:
    """Return the action of a state whose next states differ most in value, summed over its steps; `None` if none do.

    Args:
        graph: state graph of the groups, with actions.
        groups: the groups.

    Returns:
        `state`, `action`, and `next`: pairs of text and value of the best and the worst next state; `spread`: the sum
        of squared differences from the mean, by which examples are ranked.
    """
    trajectories = [one for group in groups for one in group]
    steps = [step for one in trajectories for step in one.steps]
    used, pair = same_actions(graph, np.array([one.outcome == "truncated" for one in trajectories], bool))
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


def text(found: dict[str, Any], hidden: dict[str, Any] | None) -> list[str]:
    """Return lines about both."""
    lines = []
    for name, what in (("merged", "in a state that has several observations"), ("split", "seen under several keys")):
        part = found[name]
        if part["steps"]:
            shown = " and ".join(map(repr, part["example"])) if name == "merged" else repr(part["example"])
            lines.append(f"{100 * part['steps'] / found['steps']:.0f} % of steps are {what}, as {shown}")
    if hidden is not None:
        (best, high), (worst, low) = hidden["next"]
        lines.append(
            f"from {hidden['state']!r}, {hidden['action']!r} leads to {best!r} (value {high:.2g}) and to {worst!r} "
            f"(value {low:.2g})"
        )
    return lines


def _short(words: str) -> str:
    return one_line(words, 2 * ROOM)
