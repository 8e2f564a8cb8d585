"""Credit for logged runs: an advantage for each call of a log, and statistics of its states.

Episodes of one task are a group. A group with fewer than two results has nothing to compare: its calls have no
advantage (`None`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..check.statistics import shared_share, shared_steps
from ..credit.graph import StateGraph
from ..trajectory import Trajectory
from ..utils.options import require
from ..utils.show import one_line
from ..view.words import NEWS_KEYS, action_text, state_text
from .traces import Traces

KEY_LENGTH = 80  # characters of a state key in credit.jsonl
ROWS = 5  # calls with the largest and with the smallest advantages
RARE = 0.1  # share of later calls in a state of another episode below which keys are said to be too fine
ONE_CALL = "No episode has a second call: there are no paths to compare, and the credit equals GRPO's."
TOO_FINE = """\
States hardly ever recur after the first call, so calls are compared with few others; a state of one episode only:
{example}
Pass --state-key FILE.py:FUNCTION (messages -> a text that is equal for equal situations) or --state-key similar:0.9,
or use GRPO's credit (--estimator grpo), one number for all calls of an episode."""


def credit_traces(traces: Traces, estimator: Callable[[StateGraph], np.ndarray], gamma: float = 0.95) -> StateGraph:
    """Store the credit of a log, by `StateGraph -> (S,)`, in its steps (`Step.advantage`), and return the graph.

    Raises `G2POError` if there is no call, and the errors of `StateGraph.from_groups`.
    """
    require(bool(traces.groups), "calls", "missing", "give episodes with messages of the assistant, or with calls")
    graph = StateGraph.from_groups(traces.groups, gamma)
    results = np.bincount(graph.trajectory_group[graph.trajectory_counted], minlength=graph.num_groups)
    compared = graph.counted & (results[graph.group] > 1)
    for step, advantage, is_compared in zip(traces.steps, estimator(graph), compared):
        step.advantage = float(advantage) if is_compared else None
    return graph


def rows(traces: Traces, graph: StateGraph) -> Iterator[dict[str, Any]]:
    """Yield the lines of credit.jsonl, one for each call.

    Value and visits of a call's state are `None` if its episode has no result.
    """
    trajectories = traces.trajectories
    for i, step in enumerate(traces.steps):
        trajectory, node = trajectories[graph.trajectory[i]], graph.node[i]
        yield {
            "task_id": trajectory.task_id,
            "episode": trajectory.info["episode"],
            "call": int(graph.position[i]) + 1,
            "advantage": step.advantage,
            "value": float(graph.node_values[node]) if node >= 0 else None,
            "visits": int(graph.node_visits[node]) if node >= 0 else None,
            "state_key": step.key[:KEY_LENGTH],
        }


def counts(traces: Traces) -> str:
    """Return counts of the episodes and calls that were read or left out, as lines."""

    def calls(episodes: Sequence[Trajectory]) -> str:
        return f"{sum(len(episode.steps) for episode in episodes):,} calls"

    groups, episodes = traces.groups, traces.trajectories
    sizes, missing = sorted(map(len, groups)), [episode for episode in episodes if not episode.counted]
    each = f"{sizes[0]} to {sizes[-1]} per task"
    lines = [f"{len(episodes):,} episodes of {len(groups):,} tasks ({each}), {calls(episodes)}"]
    results = [[episode for episode in group if episode.counted] for group in groups]
    if alone := [group[0] for group in results if len(group) == 1]:
        lines.append(f"{len(alone):,} tasks with one result, no advantage for {calls(alone)}")
    if missing:
        lines.append(f"{len(missing):,} episodes without a result (reward null), no advantage for {calls(missing)}")
    if traces.without_calls:
        lines.append(f"{traces.without_calls:,} episodes without a call, left out")
    for what, parts in (("fields that are not read", traces.unread), ("skipped", traces.skipped)):
        if parts:
            lines.append(f"{what}: {', '.join(f'{name} ({number:,})' for name, number in parts.most_common())}")
    return "\n  ".join(lines)


def extremes(traces: Traces, graph: StateGraph) -> str:
    """Return two tables: the calls with the largest and with the smallest advantages.

    Of several episodes that acted equally in the same state, the first with that advantage is shown.
    """
    calls, parts = list(zip(rows(traces, graph), traces.steps)), []
    for name, sign in (("largest", 1), ("smallest", -1)):
        lines: dict[tuple[str, str, str], str] = {}
        of_sign = [call for call in calls if sign * (call[0]["advantage"] or 0) > 0]
        for row, step in sorted(of_sign, key=lambda call: -sign * call[0]["advantage"]):
            lines.setdefault(
                (row["task_id"], step.key, step.compared_action),
                f"{row['advantage']:>+9.2f} {row['value']:>7.3g} {row['visits']:>6}  "
                f"{one_line(row['task_id'], 14):<14} {one_line(str(row['episode']), 10):<10} "
                f"{row['call']:>4}  {one_line(state_text(step), 30):<30}  {one_line(action_text(step), 26)}",
            )
        if lines:
            parts.append("\n".join([f"calls with the {name} advantages", _HEAD, *[*lines.values()][:ROWS]]))
    return "\n\n".join(parts) or "all advantages are 0"


_HEAD = f"{'advantage':>9} {'value':>7} {'visits':>6}  {'task':<14} {'episode':<10} {'call':>4}  {'state':<30}  action"


def states(traces: Traces, compares_states: bool = True) -> str:
    """Return whether states recur, and what to do if they do not and the estimator `compares_states`."""
    groups = [[t for t in group if t.counted] for group in traces.groups]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return "No task has two episodes with a result: nothing is compared. Log more episodes of each task."
    shared = iter(shared_steps(groups))
    later = [(step, is_shared) for group in groups for t in group for step, is_shared in [*zip(t.steps, shared)][1:]]
    later_share = sum(is_shared for _, is_shared in later) / len(later) if later else 0.0
    lines = [
        f"states: {shared_share(groups):.1%} of calls are in a state that another episode of the task visited; after "
        f"an episode's first call {later_share:.1%}",
        "; ".join(f"by {name} {shared_share(groups, key):.1%}" for name, key in NEWS_KEYS.items()),
    ]
    if equal := sum(len({t.reward for t in group}) == 1 for group in groups):
        lines.append(f"rewards: equal in all episodes of {equal:,} of {len(groups):,} tasks: they teach lengths alone")
    if compares_states and later_share < RARE:
        example = next((step.key for step, is_shared in later if not is_shared), "")
        lines.append(TOO_FINE.format(example=one_line(example, 60)) if later else ONE_CALL)
    return "\n".join(lines)
