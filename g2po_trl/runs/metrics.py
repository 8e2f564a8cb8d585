"""Logged metrics of rollouts and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..credit.estimators.g2po import g2po, g2po_terms
from ..credit.graph import StateGraph
from ..environments.validation import is_score
from ..rollout.stats import RolloutStats
from ..trajectory import Step, Trajectory
from .summary import OF_ENVIRONMENTS, OPTIONAL, summarize

_SHORT: dict[bool | None, list[str] | None] = {True: [""], False: ["another"], None: None}  # lists without the texts
_LONG = 8  # tokens; a shorter completion may be an action that is meant to end at its limit


def rollout_metrics(trajectories: Sequence[Trajectory], graph: StateGraph) -> dict[str, float]:
    """Return `graph/*` and `episode/*` of a rollout of all ranks."""
    summary = summarize(trajectories)
    return {
        **{f"episode/{name}": value for name, value in summary.items() if not isinstance(value, dict)},
        **{f"episode/{name}": value for name, value in _parts(summary).items()},
        **{f"graph/{name}": value for name, value in graph.statistics().items()},
    }


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


def gather_rollout(
    trajectories: Sequence[Trajectory],
    stats: RolloutStats,
    times: Mapping[str, float],
    gather: Callable[[list], list],
) -> tuple[list[Trajectory], RolloutStats, dict[str, float]]:
    """Return all ranks' trajectories without texts, the sum of their statistics, and the slowest rank's times."""
    ranks = gather([([without_texts(trajectory) for trajectory in trajectories], stats, times)])
    everyone = [trajectory for played, _, _ in ranks for trajectory in played]
    slowest = {name: max(rank_times[name] for _, _, rank_times in ranks) for name in times}
    return everyone, RolloutStats.over_ranks([rank_stats for _, rank_stats, _ in ranks]), slowest


def without_texts(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without texts, for `summarize` and `Tally`; short completions do not count as truncated."""
    steps = [
        Step(
            *("", "", one.valid),
            admissible_actions=_SHORT[one.admissible],
            completion_truncated=one.completion_truncated and len(one.completion_ids) >= _LONG,
            call=one.call,
        )
        for one in trajectory.steps
    ]
    info = {name: value for name, value in trajectory.info.items() if is_score(name)}
    return replace(trajectory, steps=steps, info=info, error=None, final_observation=None, task=None, row=None)


def evaluation_metrics(summary: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return a panel's summary as metrics: `eval_success_rate`, `eval_success_rate/<task_type>`, and so on."""
    numbers = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    metrics = {f"{prefix}_{name}": float(value) for name, value in numbers.items()}
    by_type = summary["success_rate_by_type"].items()
    metrics |= {f"{prefix}_success_rate/{kind}": value for kind, value in by_type}
    return metrics | {f"{prefix}_{name}": value for name, value in _parts(summary).items()}


def _parts(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics of parts: of each environment, if there are several, and the fractions of failures by kind."""
    metrics = {
        f"{name}/{environment}": float(value)
        for environment, numbers in summary.get("by_environment", {}).items()
        for name, value in numbers.items()
    }
    reasons = summary["failure_reasons"]
    for kind, number in reasons.items():
        share = number / sum(reasons.values())
        metrics[f"failures/{kind.replace(' ', '_')}"] = share * summary["failure_reason_rate"]
    return metrics


def has_metric(name: str, task_types: Collection[str], environments: Iterable[str] = ()) -> bool:
    """Return whether evaluations of tasks of these types can have a metric, named without the panel's prefix.

    `environments`: names of the environments of a run with several.
    """
    numbers = {metric for metric, value in summarize([]).items() if not isinstance(value, dict)}
    of_types = {f"success_rate/{kind}" for kind in task_types}
    of_types |= {f"{name}/{environment}" for environment in environments for name in OF_ENVIRONMENTS}
    return is_score(name) or name in numbers | of_types | {*OPTIONAL, "runtime"}
