"""Metrics of episodes: each is one row of `METRICS`. Every rank makes sums of them, which merge and give the means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
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
    """A mean over episodes or over their steps.

    Args:
        name: in logs, run files and charts.
        values: returns the numbers that an episode contributes, none if it has nothing to measure.
        title: in tables. `None`: in logs and files alone.
        short: in lines of progress and charts. `None`: in neither.
        scale: of its numbers where they are printed, 100 for percent.
        optional: it is left out, instead of nan, if no episode contributes.
        of_environments: with several environments, it is also reported of each.
        of_all: episodes without a result contribute, too.
        lower_is_better: a lower value is better.
    """

    name: str
    values: Callable[[Trajectory], Iterable[float]]
    title: str | None = None
    short: str | None = None
    scale: int = 100
    optional: bool = False
    of_environments: bool = False
    of_all: bool = False
    lower_is_better: bool = False


def _of_steps(value: Callable[[Step], float | None]) -> Callable[[Trajectory], Iterable[float]]:
    """Return the values of an episode's steps; steps with `None` contribute nothing."""
    return lambda t: [number for step in t.steps if (number := value(step)) is not None]


METRICS = (
    Metric("success_rate", lambda t: [t.success], "success: all", "success", of_environments=True),
    Metric("score", lambda t: (), "score", "score", optional=True),  # `Summary.scores`
    Metric("reward", lambda t: [t.reward], "reward", "reward", 1, of_environments=True),
    Metric("turns", lambda t: [len(t.steps)], "mean turns", "turns", 1, of_environments=True, lower_is_better=True),
    Metric("turns_to_success", lambda t: [len(t.steps)] * t.success, lower_is_better=True),
    Metric("valid_action_ratio", _of_steps(lambda step: step.valid), "valid completions", "valid"),
    Metric(
        "tool_call_ratio",  # of completions whose prompt offers tools
        _of_steps(lambda step: None if step.call is None else step.call != "none"),
        "tool calls",
        "calls",
        optional=True,
    ),
    Metric(
        "readable_call_ratio",  # of these calls
        _of_steps(lambda step: None if step.call in (None, "none") else step.call != "unreadable"),
        optional=True,
    ),
    Metric(
        "known_call_ratio",  # of the parsed ones
        _of_steps(lambda step: step.call == "known" if step.call in ("known", "unknown") else None),
        optional=True,
    ),
    Metric(
        "admissible_action_ratio",  # of steps for which the environment listed actions
        _of_steps(lambda step: step.admissible),
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
    metric, also with an environment, ("task", id), ("type", task type), ("reason", kind of failure), or "cut":
    completions that reached their limit.
    """

    totals: Counter[Any] = field(default_factory=Counter)
    numbers: Counter[Any] = field(default_factory=Counter)

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], task_types: Sequence[str | None] | None = None) -> Summary:
        """Return the sums of episodes.

        Args:
            trajectories: the episodes.
            task_types: type of each trajectory's task, for success by type; `None` where there is none.
        """
        summary = cls()
        for trajectory, kind in zip(trajectories, task_types or [None] * len(trajectories)):
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
        self._sum("cut", [step.completion_truncated and len(step.completion_ids) >= _LONG for step in steps])
        if reason := trajectory.failure_reason:
            self._sum(("reason", reason.split(":")[0].strip()), [1])
        for name in filter(is_score, trajectory.info):
            self._sum(("score", name), [float(trajectory.info[name])])

    def _sum(self, what: Any, values: Sequence[float]) -> None:
        for value in values:
            self.totals[what] += value
        self.numbers[what] += len(values)

    def _parts(self, kind: str) -> list[str]:
        return [what[1] for what in self.numbers if isinstance(what, tuple) and what[0] == kind]

    @property
    def episodes(self) -> int:
        """Number of all episodes."""
        return self.numbers["error_rate"]

    def mean(self, what: Any, number: int | None = None) -> float:
        """Return a mean, by default over the summands; nan of none."""
        number = self.numbers[what] if number is None else number
        return float(self.totals[what] / number) if number else float("nan")

    def means(self) -> dict[str, Any]:
        """Return the statistics.

        Returns:
            The logged `METRICS` by name: fractions and means of the episodes with a result; `error_rate` and
            `lost_rate` of all episodes. Means of no episodes are `nan`.
            `success_rate_error`: standard error of `success_rate` over tasks, see `careful_error`; absent below
            `FEWEST` tasks.
            `score`, `score_…`: means of these entries of `info`; episodes without one count as 0.
            `episodes`: number of all episodes.
            `success_rate_by_type`, `episodes_by_type`: by task type, and by environment if there are several.
            `by_environment`: some metrics of each environment; absent if there is one.
            `failure_reasons`: number of episodes by kind of `failure_reason`, the part before its first colon.
        """
        shown = [metric for metric in METRICS if self.numbers[metric.name] or not metric.optional]
        means: dict[str, Any] = {metric.name: self.mean(metric.name) for metric in shown}
        error = careful_error((self.totals["task", name], self.numbers["task", name]) for name in self._parts("task"))
        means |= {} if isnan(error) else {"success_rate_error": error}
        finished = self.numbers["success_rate"]
        means |= {name: self.mean(("score", name), finished) for name in sorted(self._parts("score"))}
        types, reasons = sorted(self._parts("type")), sorted(self._parts("reason"))
        by_environment = {
            name: {metric.name: self.mean((metric.name, name)) for metric in METRICS if metric.of_environments}
            for name in sorted(self._parts("success_rate"))
        }
        return {
            **means,
            "episodes": self.episodes,
            "success_rate_by_type": {name: self.mean(("type", name)) for name in types},
            "episodes_by_type": {name: self.numbers["type", name] for name in types},
            "failure_reasons": {name: self.numbers["reason", name] for name in reasons},
            **({"by_environment": by_environment} if by_environment else {}),
        }


def summarize(trajectories: Sequence[Trajectory], task_types: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Return the statistics of an evaluation or rollout, see `Summary.means`."""
    return Summary.of(trajectories, task_types).means()


def wins(group: Iterable[Trajectory]) -> tuple[int, int]:
    """Return the number of successes, and of episodes with a result."""
    results = [trajectory.success for trajectory in group if trajectory.counted]
    return sum(results), len(results)


def success_error(groups: Iterable[tuple[int, int]]) -> float | None:
    """Return the standard error of the success rate of a rollout, whose groups, by `wins`, are the sample.

    Episodes of a group share their task: if treated as independent, they would make the error too small. `None` for
    fewer than two groups with a result.
    """
    counted = [(won, number) for won, number in groups if number]
    if len(counted) < 2:
        return None
    total = sum(number for _, number in counted)
    rate = sum(won for won, _ in counted) / total
    squares = sum((won - rate * number) ** 2 for won, number in counted)
    return float((len(counted) / (len(counted) - 1) * squares) ** 0.5 / total)


def careful_error(groups: Iterable[tuple[int, int]]) -> float:
    """Return `success_error`, but at least the error of independent episodes: groups may be equal by chance.

    nan for fewer than `FEWEST` groups with a result.
    """
    counted = [(won, number) for won, number in groups if number]
    if len(counted) < FEWEST:
        return float("nan")
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
    reasons = means["failure_reasons"]
    for kind, number in reasons.items():
        share = number / sum(reasons.values())
        numbers[f"failures/{kind.replace(' ', '_')}"] = share * means["failure_reason_rate"]
    return numbers


def has_metric(name: str, task_types: Collection[str], environments: Iterable[str] = ()) -> bool:
    """Return whether evaluations of tasks of these types can have a metric, named without the panel's prefix.

    `environments`: names of the environments of a run with several.
    """
    names = {metric.name for metric in METRICS} | {f"success_rate/{kind}" for kind in task_types}
    names |= {f"{one.name}/{environment}" for environment in environments for one in METRICS if one.of_environments}
    return is_score(name) or name in names | {"success_rate_error", "episodes", "runtime"}


def advantage_metrics(
    graph: StateGraph, advantages: np.ndarray, estimator: Callable[[StateGraph], np.ndarray] | None
) -> dict[str, float]:
    """Return `advantage/*`: mean absolute advantages over counted steps; for `g2po`, also those of its terms."""
    parts = {"": advantages}
    if isinstance(estimator, partial) and estimator.func is g2po:
        options = {name: value for name, value in estimator.keywords.items() if name != "step_weight"}
        parts |= {f"{name}_": term for name, term in g2po_terms(graph, **options).items()}
    used = graph.counted
    return {
        f"advantage/{name}abs_mean": float(np.abs(values[used]).mean()) if used.any() else 0.0
        for name, values in parts.items()
    }
