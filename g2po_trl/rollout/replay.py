"""Return to a state of an earlier episode by replaying its actions, and compare every observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..environments.contract import Observation, StepResult
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..trajectory import Step
from .episode import NOT_REPLAYED, Branch, Episode, sent


def replay_to_start(episode: Episode, answer: Observation | StepResult | EnvironmentFailure) -> str | None:
    """Process an environment's answer and return the next action to replay; `None` at the episode's start.

    A branch's environment replays the parent's actions. The branch ends with outcome `"error"` if an observation or a
    reward differs from its parent's: the environment does not depend on task and actions alone. An episode that is no
    branch starts with its first observation.
    """
    if episode.observation is None:
        episode.open(answer)
    else:
        _replayed(episode, episode.branch.steps[len(episode.history)], answer)
    return None if episode.branch is None else _next(episode)


def replay_difference(pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step]) -> str | None:
    """Replay an episode's steps in a pool without others; return the first difference, or `None` if there is none."""
    episode = Episode("", branch=Branch(0, steps))
    episode.open(pool.reset([task])[0])
    for number, step in enumerate(steps):
        if not _as_before(episode, number):
            return episode.error.removeprefix(f"{NOT_REPLAYED}: ")
        if number < len(steps) - 1:
            _replayed(episode, step, pool.step({0: sent(step)})[0])
    return None


def _next(episode: Episode) -> str | None:
    """Return the next action to replay; `None` if the branch has reached its start, or has ended."""
    number = len(episode.history)
    if not _as_before(episode, number) or number == episode.start:
        return None
    return sent(episode.branch.steps[number])


def _replayed(episode: Episode, step: Step, result: StepResult | EnvironmentFailure) -> None:
    if isinstance(result, EnvironmentFailure):
        _failed(episode, result)
        return
    episode.history.append((episode.observation.text, step.action))
    episode.observation = result.observation
    episode.reward += result.reward
    if result.terminated or result.truncated:
        episode.fail(f"{NOT_REPLAYED}: the episode ended after {step.action!r}, and its parent's went on")
    elif result.reward != step.reward:
        episode.fail(f"{NOT_REPLAYED}: {step.action!r} paid {result.reward:g}, and its parent {step.reward:g}")


def _failed(episode: Episode, failure: EnvironmentFailure) -> None:
    """End a branch whose environment failed during the replay.

    An exception that the parent did not meet shows that the environment depends on more than the actions. A process
    that ended or timed out does not.
    """
    if failure.kind in ("exception", "invalid"):
        episode.fail(f"{NOT_REPLAYED}: {failure.kind}: {failure.message}")
    else:
        episode.end_without_result(failure)


def _as_before(episode: Episode, number: int) -> bool:
    """Return whether a running branch observes the same as its parent before that step; if not, end it."""
    if episode.outcome is not None:
        return False
    difference = _difference(episode.branch.steps[number], episode)
    if difference:
        episode.fail(f"{NOT_REPLAYED}: before step {number + 1}, {difference}")
    return not difference


def _difference(wanted: Step, episode: Episode) -> str | None:
    seen = episode.observation
    if seen.text != wanted.observation:
        return f"the observation is {seen.text[:200]!r}, and was {wanted.observation[:200]!r}"
    if (seen.admissible_actions or None) != (wanted.admissible_actions or None):
        return "other actions are listed than its parent saw"
    if episode.branch.compares_keys and seen.state_key != wanted.state_key:
        return "the environment's state key is another"
    return None
