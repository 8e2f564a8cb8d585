"""Metrics of episodes: each is one row of `METRICS`. Every rank makes sums of them, which merge and give the means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import isnan, nan
from operator import attrgetter
from typing import Any

import numpy as np

from ..credit.estimators.g2po import g2po, g2po_terms
from ..credit.graph import StateGraph
from ..environments.validation import is_score
from ..trajectory import Step, Trajectory

FEWEST = 5  # groups from which a standard error is estimated
_LONG = 8  # tokens; a shorter completion may be an action that is meant to end at its limit


@dataclass(frozen=True)
class Metric:
    """A mean over episodes or over their steps."""

    name: str  # in logs, run files and charts
    values: Callable[[Trajectory], Iterable[float]]  # of an episode; none if it has nothing to measure
    title: str | None = None  # in tables
    short: str | None = None  # in lines of progress and charts
    scale: int = 100  # where it is printed: 100 for percent
    optional: bool = False  # left out, instead of nan, if no episode has a value
    of_environments: bool = False  # reported also of each of several environments
    of_all: bool = False  # also of episodes without a result
    lower_is_better: bool = False


def _of_steps(value: Callable[[Step], bool | None]) -> Callable[[Trajectory], list[bool]]:
    """Return a function for the values of an episode's steps that have one."""
    return lambda t: [found for step in t.steps if (found := value(step)) is not None]


# By kinds of `Step.call`, of completions whose prompt offers tools.
_IS_KNOWN = {"known": True, "unknown": False}
_IS_READABLE = {"known": True, "unknown": True, "readable": True, "unreadable": False}
_IS_CALL = {**dict.fromkeys(_IS_READABLE, True), "none": False}
METRICS = (
    Metric("success_rate", lambda t: [t.success], "success: all", "success", of_environments=True),
    Metric("score", lambda t: (), "score", "score", optional=True),  # `Summary` adds up entries of `info`
    Metric("reward", lambda t: [t.reward], "reward", "reward", 1, of_environments=True),
    Metric("turns", lambda t: [len(t.steps)], "mean turns", "turns", 1, of_environments=True, lower_is_better=True),
    Metric("turns_to_success", lambda t: [len(t.steps)] * t.success, lower_is_better=True),
    Metric("valid_action_ratio", lambda t: [step.valid for step in t.steps], "valid completions", "valid"),
    Metric("tool_call_ratio", _of_steps(lambda step: _IS_CALL.get(step.call)), "tool calls", "calls", optional=True),
    Metric("readable_call_ratio", _of_steps(lambda step: _IS_READABLE.get(step.call)), optional=True),
    Metric("known_call_ratio", _of_steps(lambda step: _IS_KNOWN.get(step.call)), optional=True),
    Metric(
        "admissible_action_ratio",
        _of_steps(attrgetter("admissible")),
        "admissible actions",
        "admissible",
        optional=True,
    ),
    Metric("truncated_rate", lambda t: [t.outcome == "truncated"], lower_is_better=True),
    Metric("failure_reason_rate", lambda t: [t.failure_reason is not None], lower_is_better=True),
    Metric("error_rate", lambda t: [t.outcome == "error"], of_all=True, lower_is_better=True),
    Metric("lost_rate", lambda t: [t.outcome == "lost"], of_all=True, lower_is_better=True),
)
LESS_IS_BETTER = ("loss", "runtime", *(metric.name for metric in METRICS if metric.lower_is_better))


@dataclass
class Summary:
    """Sums over episodes, from which all means are computed. Sums of ranks or parts merge to those of the whole.

    `totals` and `numbers`: what is summed -> the sum, and the number of summands. What is summed is the name of a
    metric, also with an environment, ("task", id), ("type", task type), ("reason", kind of failure), "rewarded":
    episodes with success or a positive reward, or "cut": completions that reached their limit.
    """

    totals: Counter[Any] = field(default_factory=Counter)
    numbers: Counter[Any] = field(default_factory=Counter)

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], task_types: Sequence[str | None] | None = None) -> Summary:
        """Return the sums of episodes. `task_types`: type of each one's task, for success by type, or `None`."""
        summary = cls()
        for trajectory, kind in zip(trajectories, task_types or repeat(None)):
            summary._add(trajectory, kind)
        return summary

    @classmethod
    def merge(cls, summaries: Iterable[Summary]) -> Summary:
        """Return the sums of all parts."""
        merged = cls()
        for summary in summaries:
            merged.totals.update(summary.totals)
            merged.numbers.update(summary.numbers)
        return merged

    def _add(self, trajectory: Trajectory, kind: str | None) -> None:
        environment = trajectory.environment
        for metric in METRICS:
            values = list(metric.values(trajectory)) if trajectory.counted or metric.of_all else []
            self._sum(metric.name, values)
            if metric.of_environments and environment is not None:
                self._sum((metric.name, environment), values)
        if not trajectory.counted:
            return
        for name in {kind, environment} - {None}:
            self._sum(("type", name), [trajectory.success])
        self._sum(("task", trajectory.task_id), [trajectory.success])
        steps = trajectory.steps
        self._sum("rewarded", [trajectory.success or trajectory.reward > 0])
        self._sum("ended", [trajectory.outcome != "truncated" and not trajectory.failure_reason])
        self._sum("cut", [step.completion_truncated and len(step.completion_ids) >= _LONG for step in steps])
        if reason := trajectory.failure_reason:
            self._sum(("reason", reason.partition(":")[0].strip()), [1])
        for name in filter(is_score, trajectory.info):
            self._sum(("score", name), [float(trajectory.info[name])])

    def _sum(self, what: Any, values: Sequence[float]) -> None:
        self.totals[what] = sum(values, self.totals[what])
        self.numbers[what] += len(values)

    @property
    def episodes(self) -> int:
        """Number of all episodes."""
        return self.numbers["error_rate"]

    def _mean(self, what: Any) -> float:
        return float(self.totals[what] / self.numbers[what]) if self.numbers[what] else nan

    def _parts(self, kind: str) -> list[str]:
        return sorted(what[1] for what in self.numbers if isinstance(what, tuple) and what[0] == kind)

    def means(self) -> dict[str, Any]:
        """Return the statistics, most of episodes with a result alone; means of no episodes are `nan`.

        They are the `METRICS` and entries of `info` by name, `success_rate_error` (see `careful_error`) if it is
        known, `episodes`, `success_rate_by_type` and `episodes_by_type` (also by environment), `by_environment` if
        there are several, and `failure_reasons`: numbers of episodes.
        """
        shown = [metric for metric in METRICS if self.numbers[metric.name] or not metric.optional]
        means: dict[str, Any] = {metric.name: self._mean(metric.name) for metric in shown}
        tasks, types, environments = map(self._parts, ("task", "type", "success_rate"))
        error = careful_error((self.totals["task", name], self.numbers["task", name]) for name in tasks)
        means |= {} if isnan(error) else {"success_rate_error": error}
        finished = self.numbers["success_rate"]  # an episode without a score counts as 0
        means |= {name: self.totals["score", name] / finished for name in self._parts("score")}
        means["episodes"] = self.episodes
        means["success_rate_by_type"] = {name: self._mean(("type", name)) for name in types}
        means["episodes_by_type"] = {name: self.numbers["type", name] for name in types}
        means["failure_reasons"] = {name: self.numbers["reason", name] for name in self._parts("reason")}
        of_each = [metric.name for metric in METRICS if metric.of_environments]
        by_environment = {name: {metric: self._mean((metric, name)) for metric in of_each} for name in environments}
        return means | ({"by_environment": by_environment} if by_environment else {})


def summarize(trajectories: Sequence[Trajectory], task_types: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Return the statistics of an evaluation or rollout, see `Summary.means`."""
    return Summary.of(trajectories, task_types).means()


def wins(group: Iterable[Trajectory]) -> tuple[int, int]:
    """Return the number of successes, and of episodes with a result."""
    results = [trajectory.success for trajectory in group if trajectory.counted]
    return sum(results), len(results)


def success_error(groups: Iterable[tuple[int, int]]) -> float | None:
    """Return the standard error of the success rate of groups (by `wins`), the sample; `None` for fewer than two."""
    counted = [(won, number) for won, number in groups if number]
    if len(counted) < 2:
        return None
    won_in_all, total = map(sum, zip(*counted))
    squares = sum((won - won_in_all / total * number) ** 2 for won, number in counted)
    return float((len(counted) / (len(counted) - 1) * squares) ** 0.5 / total)


def careful_error(groups: Iterable[tuple[int, int]]) -> float:
    """Return `success_error`, but at least that of independent episodes; nan for fewer than `FEWEST` groups."""
    counted = [(won, number) for won, number in groups if number]
    if len(counted) < FEWEST:
        return nan
    return max(success_error(counted), error_of_share(*map(sum, zip(*counted))))


def error_of_share(won: float, number: float) -> float:
    """Return the standard error of a share, by Agresti and Coull: it is not 0 even if none or all succeeded."""
    share = (won + 1) / (number + 2)
    return (share * (1 - share) / (number + 2)) ** 0.5


def flat(means: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of `Summary.means` by one name each, such as `success_rate/<task type>`."""
    numbers = {name: value for name, value in means.items() if not isinstance(value, dict)}
    numbers |= {f"success_rate/{kind}": value for kind, value in means["success_rate_by_type"].items()}
    for environment, of_environment in means.get("by_environment", {}).items():
        numbers |= {f"{name}/{environment}": value for name, value in of_environment.items()}
    rate, total = means["failure_reason_rate"], sum(means["failure_reasons"].values())
    shares = {kind: number / total for kind, number in means["failure_reasons"].items()}
    return numbers | {f"failures/{kind.replace(' ', '_')}": share * rate for kind, share in shares.items()}


def is_metric(name: str) -> bool:
    """Return whether evaluations can report a metric, named without the panel's prefix."""
    names = {metric.name for metric in METRICS} | {"success_rate_error", "episodes", "runtime"}
    return is_score(name) or name.partition("/")[0] in names


def advantage_metrics(graph: StateGraph, advantages: np.ndarray, estimator: Callable | None) -> dict[str, float]:
    """Return `advantage/*`: mean absolute advantages over counted steps; for `g2po`, also those of its terms."""
    parts = {"": advantages}
    if isinstance(estimator, partial) and estimator.func is g2po:
        options = {name: value for name, value in estimator.keywords.items() if name != "step_weight"}
        parts |= {f"{name}_": term for name, term in g2po_terms(graph, **options).items()}
    sizes = {name: np.abs(values[graph.counted]) for name, values in parts.items()}
    return {f"advantage/{name}abs_mean": float(one.mean()) if one.size else 0.0 for name, one in sizes.items()}
