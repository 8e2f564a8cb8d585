"""Credit for logged runs: an advantage for each call of a log, and statistics of its states.

Episodes of one task are a group. A group with fewer than two results has nothing to compare: its calls have no
advantage (`None`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check.statistics import shared_share, shared_steps
from ..credit.graph import StateGraph
from ..trajectory import Step
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


@dataclass(frozen=True)
class TraceCredit:
    """The credit of a log. S calls, in the order of `traces.trajectories`.

    Args:
        traces: the log.
        graph: its state graph.
        advantages: (S,) nan for calls of groups and episodes that are not compared.
    """

    traces: Traces
    graph: StateGraph
    advantages: np.ndarray

    @property
    def steps(self) -> list[Step]:
        return [step for trajectory in self.traces.trajectories for step in trajectory.steps]


def credit_traces(traces: Traces, estimator: Callable[[StateGraph], np.ndarray], gamma: float = 0.95) -> TraceCredit:
    """Return the credit of a log by `StateGraph -> (S,)`, and store it in its steps (`Step.advantage`).

    Raises `G2POError` if there is no call, and the errors of `StateGraph.from_groups`.
    """
    remedy = "give episodes with messages of the assistant, or with calls"
    require(bool(traces.groups), "calls", "missing", remedy)
    graph = StateGraph.from_groups(traces.groups, gamma)
    compared = results_by_group(graph)[graph.group] > 1
    advantages = np.where(compared & graph.counted, estimator(graph), np.nan)
    credit = TraceCredit(traces, graph, advantages)
    for step, advantage in zip(credit.steps, advantages):
        step.advantage = None if np.isnan(advantage) else float(advantage)
    return credit


def results_by_group(graph: StateGraph) -> np.ndarray:
    """Return the number of episodes with a result, for each group."""
    return np.bincount(graph.trajectory_group[graph.trajectory_counted], minlength=graph.num_groups)


def rows(credit: TraceCredit) -> Iterator[dict[str, Any]]:
    """Yield the lines of credit.jsonl, one for each call.

    Value and visits of a call's state are `None` if its episode has no result.
    """
    graph, trajectories = credit.graph, credit.traces.trajectories
    for i, step in enumerate(credit.steps):
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


def counts(credit: TraceCredit) -> str:
    """Return counts of the episodes and calls that were read or left out, as lines."""
    traces, graph = credit.traces, credit.graph
    results, sizes = results_by_group(graph), sorted(len(group) for group in traces.groups)
    each = f"{sizes[0]} to {sizes[-1]} per task"
    lines = [f"{len(graph.rewards):,} episodes of {len(sizes):,} tasks ({each}), {graph.num_steps:,} calls"]
    if alone := int((graph.counted & (results[graph.group] == 1)).sum()):
        lines.append(f"{int((results == 1).sum()):,} tasks with one result, no advantage for {alone:,} calls")
    if missing := int((~graph.trajectory_counted).sum()):
        calls = int((~graph.counted).sum())
        lines.append(f"{missing:,} episodes without a result (reward null), no advantage for {calls:,} calls")
    if traces.without_calls:
        lines.append(f"{traces.without_calls:,} episodes without a call, left out")
    for what, parts in (("fields that are not read", traces.unread), ("skipped", traces.skipped)):
        if parts:
            lines.append(f"{what}: {', '.join(f'{name} ({number:,})' for name, number in parts.most_common())}")
    return "\n  ".join(lines)


def extremes(credit: TraceCredit) -> str:
    """Return two tables: the calls with the largest and with the smallest advantages.

    Of several episodes that acted equally in the same state, the first with that advantage is shown.
    """
    known = np.flatnonzero(~np.isnan(credit.advantages))
    order = known[np.argsort(credit.advantages[known], kind="stable")]
    parts = []
    for name, sign in (("largest", 1), ("smallest", -1)):
        of_sign = [i for i in (order[::-1] if sign > 0 else order) if sign * credit.advantages[i] > 0]
        if of_sign:
            parts += [f"calls with the {name} advantages", _HEAD, *_table(credit, of_sign), ""]
    return "\n".join(parts[:-1]) if parts else "all advantages are 0"


_HEAD = f"{'advantage':>9} {'value':>7} {'visits':>6}  {'task':<14} {'episode':<10} {'call':>4}  {'state':<30}  action"


def _table(credit: TraceCredit, order: Sequence[int]) -> list[str]:
    graph, steps, trajectories = credit.graph, credit.steps, credit.traces.trajectories
    lines: dict[tuple[int, str], str] = {}  # by state and action
    for i in order:
        node, step, trajectory = int(graph.node[i]), steps[i], trajectories[graph.trajectory[i]]
        lines.setdefault(
            (node, step.compared_action),
            f"{credit.advantages[i]:>+9.2f} {graph.node_values[node]:>7.3g} {graph.node_visits[node]:>6}  "
            f"{one_line(trajectory.task_id, 14):<14} {one_line(str(trajectory.info['episode']), 10):<10} "
            f"{graph.position[i] + 1:>4}  {one_line(state_text(step), 30):<30}  {one_line(action_text(step), 26)}",
        )
    return list(lines.values())[:ROWS]


def states(credit: TraceCredit, compares_states: bool = True) -> str:
    """Return whether states recur, and what to do if they do not and the estimator `compares_states`."""
    groups = [[t for t in group if t.counted] for group in credit.traces.groups]
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
        lines.append(
            f"rewards: equal in all episodes of {equal:,} of {len(groups):,} tasks, which teach lengths alone"
        )
    if compares_states and later_share < RARE:
        example = next((step.key for step, is_shared in later if not is_shared), "")
        lines.append(TOO_FINE.format(example=one_line(example, 60)) if later else ONE_CALL)
    return "\n".join(lines)
