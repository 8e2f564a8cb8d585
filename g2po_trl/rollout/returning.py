"""Back to a state of an earlier episode: its task and its actions, every observation compared; or the state that the
environment saved there, and what is found there compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..environments.contract import Observation, StepResult
from ..environments.pool import EnvironmentFailure, EnvironmentPool
from ..environments.replay import Restore
from ..trajectory import Step, Trajectory
from .episodes import NOT_RETURNED, Branch, Episode


def bring_back(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> int:
    """Bring branches that have seen their first observation to where they begin, and wait until all are there.

    Args:
        pool: hosts their environments.
        episodes: branches, by their slots.

    Returns:
        Number of steps that were played again.
    """
    played, asked = 0, ask_back(pool, episodes)
    while asked:
        for slot, answer in pool.take(list(asked)).items():
            take_back(episodes[slot], answer)
        played += sum(isinstance(question, str) for question in asked.values())
        asked = ask_back(pool, {slot: episodes[slot] for slot in asked})
    return played


def ask_back(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> dict[int, str | Restore]:
    """Ask environments of branches that are not yet where they begin for the next step of the way.

    Those whose environment saved its state there are given it; the others' actions are played again. A branch ends
    with outcome `"error"` if an observation or a reward is not the one that its parent saw: the environment does not
    follow from its task and the actions alone, or not from what it saved, and nobody can return to its states.

    Args:
        pool: hosts them. None of them owes an answer.
        episodes: branches that have seen their first observation, by their slots.

    Returns:
        What was asked, by slot; `take_back` takes the answers. The others are where they begin, or have ended.
    """
    asked = {slot: question for slot, episode in episodes.items() if (question := _next(episode)) is not None}
    if asked:
        pool.send(asked)
    return asked


def take_back(episode: Episode, answer: Observation | StepResult | EnvironmentFailure) -> None:
    """Take what a branch's environment answered on the way."""
    if isinstance(answer, EnvironmentFailure):
        _failed(episode, answer)
    elif isinstance(answer, StepResult):
        _replayed(episode, episode.branch.steps[len(episode.history)], answer)
    else:
        *before, _ = episode.branch.steps
        episode.history += [(step.observation, step.action) for step in before]
        episode.reward += sum(step.reward for step in before)
        episode.observation = answer


def rehearse(pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step]) -> tuple[str | None, bool]:
    """Can a branch return to the states of an episode? Its actions are played again; and if the environment saves its
    states, the one in the middle is restored and played on from.

    Args:
        pool: plays nothing else, and saves states.
        task: of the episode.
        steps: the episode's.

    Returns:
        What is different, if anything is; and whether a state was restored (nothing was different before).
    """
    middle = len(steps) // 2
    different, saved = _rehearse(pool, task, steps)
    if different or saved[middle] is None:
        return different, False
    return _rehearse(pool, task, steps, middle, saved[middle])[0], True


def _rehearse(
    pool: EnvironmentPool,
    task: dict[str, Any],
    steps: Sequence[Step],
    first: int = 0,
    state: bytes | str | None = None,
) -> tuple[str | None, list[bytes | str | None]]:
    """What is different from that step on; and what was saved before each."""
    episode = Episode("", branch=Branch(0, steps))
    seen = pool.reset([task])[0]
    if state is not None and not isinstance(seen, EnvironmentFailure):
        seen = pool.restore({0: state})[0]
    episode.open(seen)
    saved = [getattr(seen, "saved", None)]
    for number, step in enumerate(steps[first:], first):
        if not _as_before(episode, number, "restored and " if first else ""):
            return episode.error.removeprefix(f"{NOT_RETURNED}: "), saved
        if number < len(steps) - 1:
            _replayed(episode, step, pool.step({0: step.action})[0])
            saved.append(getattr(episode.observation, "saved", None))
    return None, saved


def forget_states(trajectories: Iterable[Trajectory | Episode]) -> None:
    """Once branches are played, and in evaluations, saved states only need memory."""
    for trajectory in trajectories:
        for step in trajectory.steps:
            step.saved = None


def _next(episode: Episode) -> str | Restore | None:
    """What a branch's environment is asked next. `None`: it is where the branch begins, or the branch has ended."""
    number, saved = len(episode.history), episode.branch.steps[-1].saved
    how = "restored " if saved is not None and number else ""
    if not _as_before(episode, number, how) or number == episode.start:
        return None
    return episode.branch.steps[number].action if saved is None else Restore(saved)


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
