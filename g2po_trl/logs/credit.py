"""Credit for logged runs: an advantage for each call of a log, and statistics of its states.

Episodes of one task are a group. A group with fewer than two results has nothing to compare: its calls have no
advantage (`None`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check.statistics import shared_share
from ..credit.graph import StateGraph
from ..trajectory import Step
from ..utils.errors import G2POError
from ..utils.show import one_line
from ..view.words import NEWS_KEYS, action_text, state_text
from .traces import Traces

KEY_LENGTH = 80  # characters of a state key in credit.jsonl
ROWS = 5  # calls with the largest and with the smallest advantages
RARE = 0.1  # share of later calls in a state of another episode below which keys are said to be too fine


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
    if not traces.groups:
        raise G2POError("the log has no call of a model: give episodes with messages of the assistant, or with calls")
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


def is_shared(graph: StateGraph) -> np.ndarray:
    """Return (S,) bool, whether another episode of the group visited the state of a step; `False` if not counted."""
    used, num_trajectories = graph.counted, len(graph.rewards)
    pairs = np.unique(graph.node[used] * num_trajectories + graph.trajectory[used])
    episodes = np.bincount(pairs // num_trajectories, minlength=graph.num_nodes)
    shared = np.zeros(graph.num_steps, dtype=bool)
    shared[used] = episodes[graph.node[used]] > 1
    return shared


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
    results, episodes = results_by_group(graph), len(graph.rewards)
    sizes = sorted(len(group) for group in traces.groups)
    each = f"{sizes[0]} a task" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} a task"
    if sizes[0] < sizes[-1]:
        each += f", median {sizes[len(sizes) // 2]}"
    lines = [f"{_many(episodes, 'episode')} of {_many(len(sizes), 'task')} ({each}), "]
    lines[0] += _many(graph.num_steps, "call")
    if (results == 1).any():
        single = [len(group) for group, number in zip(traces.groups, results) if number == 1]
        calls = int((graph.counted & (results[graph.group] == 1)).sum())
        lines.append(
            f"{_many(len(single), 'task')} with one episode{' that has a result' * (max(single) > 1)}: no other to "
            f"compare it with, no advantage for {_many(calls, 'call')}"
        )
    if failed := int((~graph.trajectory_counted).sum()):
        calls = _many(int((~graph.counted).sum()), "call")
        lines.append(f"{_many(failed, 'episode')} without a result (reward null): no advantage for {calls}")
    if traces.without_calls:
        lines.append(f"{_many(traces.without_calls, 'episode')} without a call: left out")
    for what, found in (("fields that are not read", traces.unread), ("skipped", traces.skipped)):
        if found:
            lines.append(f"{what}: {', '.join(f'{name} ({number:,})' for name, number in found.most_common())}")
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


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
    seen: set[tuple[int, str]] = set()
    lines = []
    for i in order:
        node, step, trajectory = int(graph.node[i]), steps[i], trajectories[graph.trajectory[i]]
        if (node, step.compared_action) in seen:
            continue
        seen.add((node, step.compared_action))
        lines.append(
            f"{credit.advantages[i]:>+9.2f} {graph.node_values[node]:>7.3g} {graph.node_visits[node]:>6}  "
            f"{one_line(trajectory.task_id, 14):<14} {one_line(str(trajectory.info['episode']), 10):<10} "
            f"{graph.position[i] + 1:>4}  {one_line(state_text(step), 30):<30}  {one_line(action_text(step), 26)}"
        )
        if len(lines) == ROWS:
            break
    return lines


def states(credit: TraceCredit, compares_states: bool = True) -> str:
    """Return whether states recur, and what to do if they do not and the estimator `compares_states`."""
    graph = credit.graph
    used = graph.counted & (results_by_group(graph)[graph.group] > 1)
    if not used.any():
        return "No task has two episodes with a result: nothing is compared. Log more episodes of each task."
    later, shared = used & (graph.position > 0), is_shared(graph)
    share, later_share = (float(shared[of].mean()) if of.any() else 0.0 for of in (used, later))
    said = [
        f"states: {share:.1%} of calls are in a state that another episode of the task visited; after an episode's "
        f"first call {later_share:.1%}"
    ]
    groups = [group for group, number in zip(credit.traces.groups, results_by_group(graph)) if number > 1]
    said.append("; ".join(f"by {name} {shared_share(groups, key):.1%}" for name, key in NEWS_KEYS.items()))
    compared, equal = _equal_rewards(graph)
    if equal:
        said.append(
            f"rewards: equal in all episodes of {equal:,} of {_many(compared, 'task')}; these episodes differ only in "
            "their lengths"
        )
    if compares_states and not later.any():
        said.append("No episode has a second call: there are no paths to compare, and the credit equals GRPO's.")
    elif compares_states and later_share < RARE:
        said.append(_too_fine(later_share, credit.steps, later & ~shared))
    return "\n".join(said)


def _equal_rewards(graph: StateGraph) -> tuple[int, int]:
    """Return the number of groups with several results, and of those whose rewards are all equal."""
    used = graph.trajectory_counted
    groups, rewards = graph.trajectory_group[used], graph.rewards[used]
    several = results_by_group(graph) > 1
    kinds = np.unique(np.column_stack([groups, rewards]), axis=0)[:, 0].astype(int)
    return int(several.sum()), int((several & (np.bincount(kinds, minlength=graph.num_groups) == 1)).sum())


def _too_fine(share: float, steps: Sequence[Step], alone: np.ndarray) -> str:
    example = one_line(next(steps[i].key for i in np.flatnonzero(alone)), 60)
    return (
        f"States {'hardly ever' if share else 'never'} recur after the first call, so calls are not compared with "
        f"others in the same state; a state of one episode only: {example}\n"
        "Pass --state-key FILE.py:FUNCTION, where FUNCTION(messages) returns a text that is equal for equal "
        "situations: what the agent has achieved so far (files changed, tests passed, page shown), or the last result "
        "without numbers, times and ids. --state-key similar:0.9 merges keys that share 90 % of their word pairs. If "
        "no key fits, use GRPO's credit (--estimator grpo), one number for all calls of an episode."
    )


def _many(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
