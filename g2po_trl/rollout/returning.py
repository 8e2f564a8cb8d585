"""Back to a state of an earlier episode: its task and its actions, every observation compared; or the state that the
environment saved there, and what is found there compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..environments.contract import StepResult
from ..environments.pool import EnvironmentFailure, EnvironmentPool
from ..trajectory import Step, Trajectory
from .episodes import NOT_RETURNED, Episode


def bring_back(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> int:
    """Bring branches that have seen their first observation to where they begin; the rest of them is up to others.

    Those whose environment saved its state there are given it; the others' actions are played again. A branch ends
    with outcome `"error"` if an observation is not the one that its parent saw: the environment does not follow from
    its task and the actions alone, or not from what it saved, and nobody can return to its states.

    Args:
        pool: hosts their environments.
        episodes: branches, by their slots.

    Returns:
        Number of steps that were played again.
    """
    saved = {slot: episode for slot, episode in episodes.items() if episode.branch.steps[-1].saved is not None}
    _restore(pool, saved)
    return _play_again(pool, {slot: episode for slot, episode in episodes.items() if slot not in saved})


def forget_states(trajectories: Iterable[Trajectory]) -> None:
    """Once branches are played, saved states only need memory."""
    for trajectory in trajectories:
        for step in trajectory.steps:
            step.saved = None


def _restore(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> None:
    begun = {slot: episode for slot, episode in episodes.items() if _as_before(episode, 0)}
    states = {slot: episode.branch.steps[-1].saved for slot, episode in begun.items()}
    for slot, seen in pool.restore(states).items() if states else ():
        episode = begun[slot]
        if isinstance(seen, EnvironmentFailure):
            episode.fail(f"{NOT_RETURNED}: {seen.kind}: {seen.message}")
            continue
        *before, _ = episode.branch.steps
        episode.history += [(step.observation, step.action) for step in before]
        episode.reward += sum(step.reward for step in before)
        episode.observation = seen
        _as_before(episode, episode.start, "restored ")


def _play_again(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> int:
    played = 0
    for number in range(max((episode.start for episode in episodes.values()), default=0) + 1):
        actions = {}
        for slot, episode in episodes.items():
            if number <= episode.start and _as_before(episode, number) and number < episode.start:
                actions[slot] = episode.branch.steps[number].action
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


def _as_before(episode: Episode, number: int, how: str = "") -> bool:
    """Does a live branch see what its parent saw before that step? If it does not, it ends."""
    if episode.outcome is not None:
        return False
    difference = _difference(episode.branch.steps[number], episode)
    if difference:
        episode.fail(f"{NOT_RETURNED}: {how}before step {number + 1}, {difference}")
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
