"""A group of a rollout as plain data for the page: its state graph, episodes, and the advantage of every step.

Two marks point to failures: the *turning point* of an episode, and the reason why a group *taught nothing*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..credit.estimators.g2po import g2po_terms
from ..credit.estimators.registry import ESTIMATORS, row_of
from ..credit.graph import StateGraph
from ..credit.turning import turning_steps
from ..trajectory import Step, Trajectory
from .labels import state_labels
from .texts import Prompts, Texts, conversation_data, episode_data, step_data, task_data
from .words import state_text

NUM_DISAGREEMENTS = 8
_ZERO = 1e-6  # values and advantages below it are 0, but for rounding


def is_g2po(settings: Mapping[str, Any]) -> bool:
    """Return whether the run was trained with G2PO, whose advantages have the parts A_EP, A_NC and A_EC."""
    name = settings.get("estimator_name") or settings.get("advantage_estimator") or "g2po"
    return row_of(name) is ESTIMATORS["g2po"]


def group_data(
    group: Sequence[Trajectory],
    texts: Texts,
    settings: Mapping[str, Any],
    value_lambda: float,
    prompts: Prompts | None = None,
) -> dict[str, Any]:
    """Return a group as plain data.

    Args:
        group: the trajectories of one task.
        texts: collects the texts; the data refers to them by number.
        settings: settings of the estimator.
        value_lambda: λ of the node values.
        prompts: decodes prompts and tokens. `None`: leave them out.

    Returns:
        Plain data. Each step has `trained`, its advantage in training (`None` if the run did not store it), and with
        G2PO `adv`, the parts [A_EP, w A_NC, w A_EC] computed now.
        `adds_up`: whether the parts sum to `trained` (`None` for other estimators). `success`: number of successful
        episodes. `nothing`: see `taught_nothing`; `turns` of an episode: see `turning_points`. A node has its state
        key as "key", unless it is the text of the state.
    """
    graph = StateGraph.from_groups([group], settings.get("gamma", 0.95), value_lambda)
    parts = _parts(graph, settings) if is_g2po(settings) else None
    steps = [step for trajectory in group for step in trajectory.steps]
    trajectories = []
    for number, trajectory in enumerate(group):
        read = [
            {
                **step_data(steps[i], texts, prompts),
                "node": int(graph.node[i]),
                "next": int(graph.next_node[i]),
                "adv": None if parts is None else [round(float(x), 4) for x in parts[i]],
                "trained": None if steps[i].advantage is None else round(steps[i].advantage, 4),
            }
            for i in np.flatnonzero(graph.trajectory == number)
        ]
        turns = turning_points(trajectory, graph, number)
        trajectories.append({**episode_data(trajectory, texts), "turns": turns, "steps": read})
    images = [one.get("img") for played in trajectories for one in played["steps"]]
    nodes: list[dict[str, Any]] = [
        {"o": None, "key": None, "v": round(float(value), 4), "visits": int(visits), "actions": None}
        for value, visits in zip(graph.node_values, graph.node_visits)
    ]
    for i, step in enumerate(steps):
        if graph.node[i] >= 0 and nodes[graph.node[i]]["o"] is None:
            nodes[graph.node[i]] |= {
                **conversation_data(step, texts),
                **({"img": images[i]} if images[i] else {}),
                "o": texts.number(state_text(step)),
                "key": None if step.key == state_text(step) else texts.number(step.key),
                "actions": texts.number("\n".join(step.admissible_actions or ())),
            }
    keys = [texts.all[node["o"] if node["key"] is None else node["key"]] for node in nodes]
    for node, label in zip(nodes, state_labels([texts.all[node["o"]] for node in nodes], keys)):
        node["label"] = label
    return {
        **task_data(group[0], texts),
        "stored": any(step.advantage is not None for step in steps),
        "adds_up": None if parts is None else _adds_up(steps, parts),
        "success": sum(t.success for t in group),
        "nothing": taught_nothing(group, None if parts is None else parts.sum(axis=1)),
        "trajectories": trajectories,
        "nodes": nodes,
    }


def turning_points(trajectory: Trajectory, graph: StateGraph, number: int) -> list[dict[str, Any]]:
    """Return the steps of an episode with the largest losses of value, the turning point first; see `credit.turning`.

    Args:
        trajectory: the episode.
        graph: state graph of its group.
        number: its place in the group.

    Returns:
        Each with "step" from 0, and "why": "fall" of V, with the values "from" and "to"; "limit" for the fall of a
        last step at the turn limit, which is followed by the largest fall before it. In a failed episode whose V never
        falls (it is the same everywhere if the group has no success): "fault", the first step whose completion is not
        valid or whose action is not admissible, or else "return", the first to a state where the episode had been.
    """
    mine = graph.trajectory == number
    before, after, nodes, following = (x[mine] for x in (graph.values, graph.next_values, graph.node, graph.next_node))

    def fall(step: int, why: str = "fall") -> dict[str, Any]:
        return {"step": step, "why": why, "from": round(float(before[step]), 4), "to": round(float(after[step]), 4)}

    turn, last = int(turning_steps(graph)[number]), len(trajectory.steps) - 1
    if turn == last and trajectory.outcome == "truncated":
        earlier = int(np.argmax((before - after)[:-1])) if last else None
        known = earlier is not None and (before - after)[earlier] > _ZERO
        return [fall(turn, "limit"), *([fall(earlier)] if known else [])]
    if turn >= 0 or trajectory.success or not trajectory.counted:
        return [fall(turn)] if turn >= 0 else []
    faults = [n for n, one in enumerate(trajectory.steps) if not one.valid or one.admissible is False]
    returns = [n for n, node in enumerate(following) if node in nodes[: n + 1]]
    found = [("fault", n) for n in faults] + [("return", n) for n in returns]
    return [{"step": step, "why": why} for why, step in found[:1]]


def taught_nothing(group: Sequence[Trajectory], computed: np.ndarray | None = None) -> str | None:
    """Return why no step of a group had an advantage; `None` if one had, or if this is unknown.

    "errors": no episode has a result; "one": a single one has; "solved", "failed": all; "equal": equal rewards.

    Args:
        group: the trajectories.
        computed: advantages of all steps, for a run that did not store them.
    """
    stored = [step.advantage for one in group for step in one.steps if step.advantage is not None]
    advantages = stored or computed
    counted = [trajectory for trajectory in group if trajectory.counted]
    if counted and (advantages is None or np.abs(advantages).max(initial=0.0) > _ZERO):
        return None
    if len(counted) < 2:
        return "one" if counted else "errors"
    wins = sum(trajectory.success for trajectory in counted)
    return "failed" if not wins else "solved" if wins == len(counted) else "equal"


def disagreements(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps with A_NC < 0 < A_EC, as in the paper's case study, sorted by the difference."""
    found: dict[tuple, dict[str, Any]] = {}
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group["trajectories"]):
            for s, step in enumerate(trajectory["steps"]):
                if step["adv"] is None:
                    continue
                _, local, gain = step["adv"]
                if local < 0 < gain:
                    edge = (g, step["node"], step["next"])
                    found.setdefault(edge, {"group": g, "trajectory": t, "step": s, "by": round(gain - local, 3)})
    return sorted(found.values(), key=lambda one: -one["by"])[:NUM_DISAGREEMENTS]


def _parts(graph: StateGraph, settings: Mapping[str, Any]) -> np.ndarray:
    """Return A_EP, w A_NC and w A_EC of each step, (S, 3)."""
    scale = settings.get("scale_by_std", settings.get("scale_rewards", "group") == "group")
    penalty, weight = settings.get("invalid_action_penalty", 0.0), settings.get("step_advantage_weight", 1.0)
    terms = g2po_terms(graph, scale, penalty, **(settings.get("estimator_kwargs") or {}))
    none = np.zeros(graph.num_steps)
    return np.column_stack([terms["episode"], *(weight * terms.get(name, none) for name in ("node", "edge"))])


def _adds_up(steps: Sequence[Step], parts: np.ndarray) -> bool:
    return all(
        abs(step.advantage - own) < 1e-3 for step, own in zip(steps, parts.sum(axis=1)) if step.advantage is not None
    )
