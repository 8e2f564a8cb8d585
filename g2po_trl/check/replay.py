"""Replay an episode's actions in another environment, and compare its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..environments.contract import Observation
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..rollout.episode import sent
from ..trajectory import Step


def replay_difference(pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step]) -> str | None:
    """Replay an episode's steps in a pool without others; return the first difference, or `None` if there is none."""
    answer = pool.reset([task])[0]
    for number, step in enumerate(steps, 1):
        if isinstance(answer, EnvironmentFailure):
            return f"{answer.kind}: {answer.message}"
        seen = answer if isinstance(answer, Observation) else answer.observation
        if different := _difference(step, seen):
            return f"before step {number}, {different}"
        if number == len(steps):
            break
        answer = pool.step({0: sent(step)})[0]
        if isinstance(answer, EnvironmentFailure):
            continue
        if answer.terminated or answer.truncated:
            reason = answer.info.get("failure_reason")
            why = f" ({reason})" if reason else ""
            return f"the episode ended after {step.action!r}{why}, and continued before"
        if answer.reward != step.reward:
            return f"{step.action!r} returned reward {answer.reward:g}, and {step.reward:g} before"
    return None


def _difference(before: Step, seen: Observation) -> str | None:
    if seen.text != before.observation:
        return f"the observation is {seen.text[:200]!r}, and was {before.observation[:200]!r}"
    if list(seen.images) != (before.images or []):
        return "the images are different"
    if (seen.admissible_actions or None) != (before.admissible_actions or None):
        return "the listed actions are different"
    if seen.state_key != before.state_key:
        return "the environment's state key is different"
    return None
