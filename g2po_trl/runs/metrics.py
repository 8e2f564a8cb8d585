"""Numbers that are logged about a rollout and an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..credit.advantages import edge_advantage, episode_advantage, node_advantage
from ..credit.graph import StateGraph
from ..environments.checks import is_score
from ..rollout.stats import RolloutStats
from ..trajectory import Step, Trajectory
from .evaluation import summarize

if TYPE_CHECKING:
    from ..config import G2POConfig


def rollout_metrics(trajectories: Sequence[Trajectory], graph: StateGraph, args: G2POConfig) -> dict[str, float]:
    """`episode/*`, `graph/*` and `advantage/*` of a rollout, all ranks' trajectories in whole groups.

    `episode/*` is about the episodes that are not held back for branches: as many of each task. More of them begin at
    the beginning where a group has won, so that all of those together would be too good.
    """
    scale, penalty = args.scale_by_std, args.invalid_action_penalty
    parts = {
        "episode": episode_advantage(graph, scale, penalty, args.episode_statistics),
        "node": node_advantage(graph, scale, penalty if args.episode_statistics == "step" else 0.0),
        "edge": edge_advantage(graph, scale),
    }
    size, first = args.num_generations, args.num_generations - args.num_branches
    summary = summarize([played for place, played in enumerate(trajectories) if place % size < first])
    return {
        **{f"episode/{name}": value for name, value in summary.items() if not isinstance(value, dict)},
        **{f"graph/{name}": value for name, value in graph.statistics().items()},
        **{f"advantage/{name}_abs_mean": float(np.abs(a).mean()) if len(a) else 0.0 for name, a in parts.items()},
    }


def branch_metrics(trajectories: Sequence[Trajectory], stats: RolloutStats) -> dict[str, float]:
    """What `branch_share` adds to the log."""
    branches = [played for played in trajectories if played.parent is not None]
    return {
        "rollout/branches": len(branches),
        "rollout/branch_errors": sum(not played.counted for played in branches),
        "rollout/replayed_steps": stats.replayed_steps,
    }


def gather_rollout(
    trajectories: Sequence[Trajectory],
    stats: RolloutStats,
    times: Mapping[str, float],
    gather: Callable[[list], list],
) -> tuple[list[Trajectory], RolloutStats, dict[str, float]]:
    """All ranks' trajectories, without their texts; what they cost; the times of the slowest rank.

    Args:
        gather: a list of each rank -> the lists of all, joined.
    """
    ranks = gather([([_without_texts(trajectory) for trajectory in trajectories], stats, times)])
    everyone = [trajectory for played, _, _ in ranks for trajectory in played]
    slowest = {name: max(rank_times[name] for _, _, rank_times in ranks) for name in times}
    return everyone, RolloutStats.over_ranks([rank_stats for _, rank_stats, _ in ranks]), slowest


def _without_texts(trajectory: Trajectory) -> Trajectory:
    """What `summarize` needs of a trajectory, small enough to gather."""
    steps = [Step("", "", step.valid, policy_version=step.policy_version) for step in trajectory.steps]
    info = {name: value for name, value in trajectory.info.items() if is_score(name)}
    return Trajectory(
        trajectory.task_id,
        steps,
        trajectory.reward,
        trajectory.outcome,
        info=info,
        failure_reason=trajectory.failure_reason,
        parent=trajectory.parent,
        start=trajectory.start,
    )


def evaluation_metrics(summary: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """A panel's summary as metrics: `eval_success_rate`, `eval_success_rate/<task_type>`, …"""
    numbers = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    metrics = {f"{prefix}_{name}": float(value) for name, value in numbers.items()}
    by_type = summary["success_rate_by_type"].items()
    return metrics | {f"{prefix}_success_rate/{kind}": value for kind, value in by_type}
