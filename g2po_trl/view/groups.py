"""A group of a rollout as plain data for the page: its state graph, episodes, and the advantage of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..credit.estimators.g2po import g2po_terms
from ..credit.estimators.registry import ESTIMATORS, row_of
from ..credit.graph import StateGraph
from ..credit.turning import turning_steps
from ..trajectory import Trajectory
from .labels import state_labels
from .texts import Prompts, Texts, episode_data, shown_data, step_data, task_data
from .words import state_text

_ZERO = 1e-6  # values and advantages below it are 0, but for rounding


def lambda_of(settings: Mapping[str, Any]) -> float | None:
    """Return λ of the node values of a run with G2PO; `None` for other estimators, whose values are mean returns."""
    name = settings.get("estimator_name") or settings.get("advantage_estimator") or "g2po"
    return settings.get("value_lambda", 1.0) if row_of(name) is ESTIMATORS["g2po"] else None


def group_data(
    group: Sequence[Trajectory], texts: Texts, settings: Mapping[str, Any], prompts: Prompts | None = None
) -> dict[str, Any]:
    """Return a group as plain data.

    Args:
        group: the trajectories of one task.
        texts: collects the texts; the data refers to them by number.
        settings: settings of the estimator.
        prompts: decodes prompts and tokens. `None`: leave them out.

    Returns:
        Plain data. Each step has `trained`, its advantage in training (`None` if the run did not store it), and with
        G2PO `adv`, the parts [A_EP, w A_NC, w A_EC] computed now; `adds_up`: whether the parts sum to `trained`.
        `nothing`: see `taught_nothing`; `turns` of an episode: see `turning_points`. A node has its state key as
        "key", unless it is the text of the state.
    """
    value_lambda = lambda_of(settings)
    graph = StateGraph.from_groups([group], settings.get("gamma", 0.95), 1.0 if value_lambda is None else value_lambda)
    steps = [step for trajectory in group for step in trajectory.steps]
    parts = None if value_lambda is None else _parts(graph, settings)
    trained = np.array([step.advantage for step in steps], dtype=float)  # NaN: not stored
    stored = not np.isnan(trained).all()

    def data_of(i: int) -> dict[str, Any]:
        return {
            **step_data(steps[i], texts, prompts),
            "node": int(graph.node[i]),
            "next": int(graph.next_node[i]),
            "adv": None if parts is None else parts[i].round(4).tolist(),
            "trained": None if steps[i].advantage is None else round(steps[i].advantage, 4),
        }

    of_episode = [np.flatnonzero(graph.trajectory == m) for m in range(len(group))]
    trajectories = [
        {"turns": turns, "steps": list(map(data_of, places)), **episode_data(one, texts)}
        for one, turns, places in zip(group, turning_points(group, graph), of_episode)
    ]
    firsts = [steps[i] for node, i in zip(*np.unique(graph.node, return_index=True)) if node >= 0]  # of each node
    labels = state_labels([state_text(step) for step in firsts], [step.key for step in firsts])
    nodes = [
        {
            **shown_data(step, texts),
            "o": texts.number(state_text(step)),
            "key": None if step.key == state_text(step) else texts.number(step.key),
            "v": round(float(graph.node_values[node]), 4),
            "visits": int(graph.node_visits[node]),
            "actions": texts.number("\n".join(step.admissible_actions or ())),
            "label": label,
        }
        for node, (step, label) in enumerate(zip(firsts, labels))
    ]
    sums = None if parts is None else parts.sum(axis=1)
    return {
        **task_data(group[0], texts.number),
        "stored": stored,
        "adds_up": None if sums is None else not (np.abs(trained - sums) >= 1e-3).any(),
        "success": sum(t.success for t in group),
        "nothing": taught_nothing(group, trained[~np.isnan(trained)] if stored else sums),
        "trajectories": trajectories,
        "nodes": nodes,
    }


def turning_points(group: Sequence[Trajectory], graph: StateGraph) -> list[list[dict[str, Any]]]:
    """Return each episode's steps with the largest losses of value, its turning point first; see `credit.turning`.

    Returns:
        Each with "step" from 0, and "why": "fall" of V, with the values "from" and "to"; "limit" for the fall of a
        last step at the turn limit, which is followed by the largest fall before it. In a failed episode whose V never
        falls (it is the same everywhere if the group has no success): "fault", the first step whose completion is not
        valid or whose action is not admissible, or else "return", the first to a state where the episode had been.
    """
    turns = turning_steps(graph).tolist()
    return [_turns(one, turn, graph, graph.trajectory == m) for m, (one, turn) in enumerate(zip(group, turns))]


def _turns(episode: Trajectory, turn: int, graph: StateGraph, mine: np.ndarray) -> list[dict[str, Any]]:
    before, after, nodes, following = (x[mine] for x in (graph.values, graph.next_values, graph.node, graph.next_node))
    if turn >= 0:
        found, falls = [(turn, "fall")], before - after
        if turn == len(falls) - 1 and episode.outcome == "truncated":
            falls[turn] = 0.0
            earlier = int(falls.argmax())
            found = [(turn, "limit"), *([(earlier, "fall")] if falls[earlier] > _ZERO else [])]
        values = np.column_stack([before, after]).round(4).tolist()
        return [{"step": n, "why": why, "from": values[n][0], "to": values[n][1]} for n, why in found]
    if episode.success or not episode.counted:
        return []
    found = [(n, "fault") for n, step in enumerate(episode.steps) if not step.valid or step.admissible is False]
    found += [(n, "return") for n, node in enumerate(following) if node in nodes[: n + 1]]
    return [{"step": n, "why": why} for n, why in found[:1]]


def taught_nothing(group: Sequence[Trajectory], advantages: np.ndarray | None) -> str | None:
    """Return why no step of a group had one of these advantages; `None` if one had, or if they are unknown.

    "errors": no episode has a result; "one": a single one has; "solved", "failed": all; "equal": equal rewards.
    """
    counted = [trajectory for trajectory in group if trajectory.counted]
    if counted and (advantages is None or np.abs(advantages).max(initial=0.0) > _ZERO):
        return None
    if len(counted) < 2:
        return "one" if counted else "errors"
    wins = sum(trajectory.success for trajectory in counted)
    return "failed" if not wins else "solved" if wins == len(counted) else "equal"


def _parts(graph: StateGraph, settings: Mapping[str, Any]) -> np.ndarray:
    """Return A_EP, w A_NC and w A_EC of each step, (S, 3)."""
    scale = settings.get("scale_by_std", settings.get("scale_rewards", "group") == "group")
    penalty, weight = settings.get("invalid_action_penalty", 0.0), settings.get("step_advantage_weight", 1.0)
    terms = g2po_terms(graph, scale, penalty, **(settings.get("estimator_kwargs") or {}))
    none = np.zeros(graph.num_steps)
    return np.column_stack([terms["episode"], *(weight * terms.get(name, none) for name in ("node", "edge"))])
