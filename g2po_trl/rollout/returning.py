"""Back to a state of an earlier episode: its task, its actions, and every observation compared."""

from __future__ import annotations

from collections.abc import Mapping

from ..environments.contract import StepResult
from ..environments.pool import EnvironmentFailure, EnvironmentPool
from ..trajectory import Step
from .episodes import NOT_RETURNED, Episode


def bring_back(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> int:
    """Bring branches that have seen their first observation to where they begin; the rest of them is up to others.

    A branch ends with outcome `"error"` if an observation is not the one that its parent saw: the environment does not
    follow from its task and the actions alone, and nobody can return to its states.

    Args:
        pool: hosts their environments.
        episodes: branches, by their slots.

    Returns:
        Number of steps that were played again.
    """
    played = 0
    for number in range(max((episode.start for episode in episodes.values()), default=0) + 1):
        actions = {}
        for slot, episode in episodes.items():
            if episode.outcome is None and number <= episode.start:
                wanted = episode.branch.steps[number]
                difference = _difference(wanted, episode)
                if difference:
                    episode.fail(f"{NOT_RETURNED}: before step {number + 1}, {difference}")
                elif number < episode.start:
                    actions[slot] = wanted.action
        for slot, result in pool.step(actions).items() if actions else ():
            _replayed(episodes[slot], actions[slot], result)
        played += len(actions)
    return played


def _replayed(episode: Episode, action: str, result: StepResult | EnvironmentFailure) -> None:
    if isinstance(result, EnvironmentFailure):
        episode.fail(f"{NOT_RETURNED}: {result.kind}: {result.message}")
        return
    episode.history.append((episode.observation.text, action))
    episode.observation = result.observation
    episode.reward += result.reward
    if result.terminated or result.truncated:
        episode.fail(f"{NOT_RETURNED}: the episode ended after {action!r}, and its parent's went on")


def _difference(wanted: Step, episode: Episode) -> str | None:
    seen = episode.observation
    if seen.text != wanted.observation:
        return f"the observation is {seen.text[:200]!r}, and was {wanted.observation[:200]!r}"
    if (seen.admissible_actions or None) != (wanted.admissible_actions or None):
        return "other actions are listed than its parent saw"
    if episode.branch.compares_keys and seen.state_key != wanted.state_key:
        return "the environment's state key is another"
    return None
