"""Back to a state of an earlier episode: its task and its actions, every observation compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..environments.contract import Observation, StepResult
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..trajectory import Step
from .episode import NOT_RETURNED, Branch, Episode


def return_to_start(episode: Episode, answer: Observation | StepResult | EnvironmentFailure) -> str | None:
    """Take an environment's answer before its episode is asked, and return the next action on the way to its start.

    A branch's environment plays the parent's actions again. The branch ends with outcome `"error"` if an observation
    or a reward is not its parent's: the environment does not follow from its task and the actions alone.

    Returns:
        `None` when the episode is where it begins, or has ended. An episode that is no branch begins with its first
        observation.
    """
    if episode.observation is None:
        episode.open(answer)
    else:
        _replayed(episode, episode.branch.steps[len(episode.history)], answer)
    return None if episode.branch is None else _next(episode)


def rehearse(pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step]) -> str | None:
    """Play an episode's actions again, and return the first difference; `None`: a branch can return to its states.

    Args:
        pool: plays nothing else.
        task: of the episode.
        steps: the episode's.
    """
    episode = Episode("", branch=Branch(0, steps))
    episode.open(pool.reset([task])[0])
    for number, step in enumerate(steps):
        if not _as_before(episode, number):
            return episode.error.removeprefix(f"{NOT_RETURNED}: ")
        if number < len(steps) - 1:
            _replayed(episode, step, pool.step({0: step.action})[0])
    return None


def _next(episode: Episode) -> str | None:
    """The next action of a branch's way back. `None`: it is where the branch begins, or the branch has ended."""
    number = len(episode.history)
    if not _as_before(episode, number) or number == episode.start:
        return None
    return episode.branch.steps[number].action


def _replayed(episode: Episode, step: Step, result: StepResult | EnvironmentFailure) -> None:
    if isinstance(result, EnvironmentFailure):
        _failed(episode, result)
        return
    episode.history.append((episode.observation.text, step.action))
    episode.observation = result.observation
    episode.reward += result.reward
    if result.terminated or result.truncated:
        episode.fail(f"{NOT_RETURNED}: the episode ended after {step.action!r}, and its parent's went on")
    elif result.reward != step.reward:
        episode.fail(f"{NOT_RETURNED}: {step.action!r} paid {result.reward:g}, and its parent {step.reward:g}")


def _failed(episode: Episode, failure: EnvironmentFailure) -> None:
    """What raises where it did not for the parent follows from something else than the actions. A process that ends or
    takes too long says nothing of that kind."""
    if failure.kind in ("exception", "invalid"):
        episode.fail(f"{NOT_RETURNED}: {failure.kind}: {failure.message}")
    else:
        episode.end_without_result(failure)


def _as_before(episode: Episode, number: int) -> bool:
    """Does a live branch see what its parent saw before that step? If it does not, it ends."""
    if episode.outcome is not None:
        return False
    difference = _difference(episode.branch.steps[number], episode)
    if difference:
        episode.fail(f"{NOT_RETURNED}: before step {number + 1}, {difference}")
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
