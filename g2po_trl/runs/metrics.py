"""Numbers that are logged about a rollout and an update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..credit.advantages import edge_advantage, episode_advantage, node_advantage
from ..credit.graph import StateGraph
from ..environments.checks import is_score
from ..trajectory import Step, Trajectory
from .evaluation import summarize

if TYPE_CHECKING:
    from ..config import G2POConfig


def rollout_metrics(trajectories: Sequence[Trajectory], graph: StateGraph, args: G2POConfig) -> dict[str, float]:
    """`episode/*`, `graph/*` and `advantage/*` of a rollout, all ranks' trajectories."""
    scale, penalty = args.scale_by_std, args.invalid_action_penalty
    parts = {
        "episode": episode_advantage(graph, scale, penalty, args.episode_statistics),
        "node": node_advantage(graph, scale, penalty if args.episode_statistics == "step" else 0.0),
        "edge": edge_advantage(graph, scale),
    }
    summary = summarize(trajectories)
    return {
        **{f"episode/{name}": value for name, value in summary.items() if not isinstance(value, dict)},
        **{f"graph/{name}": value for name, value in graph.statistics().items()},
        **{f"advantage/{name}_abs_mean": float(np.abs(a).mean()) if len(a) else 0.0 for name, a in parts.items()},
    }


def without_texts(trajectory: Trajectory) -> Trajectory:
    """What `summarize` needs of a trajectory, small enough to gather."""
    steps = [Step(observation="", action="", valid=step.valid) for step in trajectory.steps]
    info = {name: value for name, value in trajectory.info.items() if is_score(name)}
    return Trajectory(
        trajectory.task_id,
        steps,
        trajectory.reward,
        trajectory.outcome,
        info=info,
        failure_reason=trajectory.failure_reason,
    )


def merge_micro_batch_metrics(metrics: dict[str, list[float]], marks: dict[str, int], tokens: list[int]) -> None:
    """One value a slice for what the loss logged once a micro-batch, so that metrics do not depend on the cut either.

    Means are weighted by reply tokens; `…_min` and `…_max` keep their meaning. A slice without any has no value: the
    loss logs zeros for it, and an entropy of 0 would read as a policy that has collapsed.
    """
    for name, values in list(metrics.items()):
        mark = marks.get(name, 0)
        new = values[mark:]
        if len(new) != len(tokens):
            continue
        if not sum(tokens):
            del values[mark:]
            if not values:
                del metrics[name]
            continue
        pairs = [(value, weight) for value, weight in zip(new, tokens) if not math.isnan(value)]
        if not pairs:
            merged = float("nan")
        elif name.endswith("_min"):
            merged = min(value for value, _ in pairs)
        elif name.endswith("_max"):
            merged = max(value for value, _ in pairs)
        else:
            merged = sum(value * weight for value, weight in pairs) / max(1, sum(weight for _, weight in pairs))
        values[mark:] = [merged]


def evaluation_metrics(summary: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """A panel's summary as metrics: `eval_success_rate`, `eval_success_rate/<task_type>`, …"""
    numbers = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    metrics = {f"{prefix}_{name}": float(value) for name, value in numbers.items()}
    by_type = summary["success_rate_by_type"].items()
    return metrics | {f"{prefix}_success_rate/{kind}": value for kind, value in by_type}
