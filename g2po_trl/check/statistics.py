"""How often states recur, in groups and within episodes, and whether a number in their keys prevents it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..credit.state_keys import NUMBER
from ..trajectory import Step, Trajectory
from ..utils.show import different_parts

_HARDLY, _OFTEN = 0.02, 0.1  # of steps that return to a state of their episode


class NumberInKeys(NamedTuple):
    """A number that makes each state of an episode new: shares of steps that return with and without numbers."""

    returned: float
    without: float
    examples: list[str]

    def __str__(self) -> str:
        return (
            f"{100 * self.returned:.0f} % of steps return to a state of their episode, and {100 * self.without:.0f} % "
            f"would if keys had no numbers, as {' and '.join(map(repr, self.examples))}"
        )


def shared_share(groups: Sequence[Sequence[Trajectory]], key: Callable[[Step], str] = lambda step: step.key) -> float:
    """Return the share of steps whose state, by `key`, another episode of the group visited too; 0 without steps.

    Episodes without a result are left out.
    """
    steps = shared = 0
    for group in groups:
        episodes = [[key(step) for step in trajectory.steps] for trajectory in group if trajectory.counted]
        visits = Counter(name for episode in episodes for name in set(episode))
        steps += sum(map(len, episodes))
        shared += sum(visits[name] > 1 for episode in episodes for name in episode)
    return shared / steps if steps else 0.0


def returned_share(
    trajectories: Iterable[Trajectory], key: Callable[[Step], str] = lambda step: step.key
) -> float | None:
    """Return the share of steps, except first ones, whose state, by `key`, the same episode had visited before.

    `None` if no episode has a second step.
    """
    steps = returned = 0
    for trajectory in trajectories:
        keys = list(map(key, trajectory.steps))
        steps += max(0, len(keys) - 1)
        returned += len(keys) - len(set(keys))
    return returned / steps if steps else None


def count_in_keys(trajectories: Sequence[Trajectory]) -> NumberInKeys | None:
    """Return the number in the keys that makes each state of an episode new, such as a step counter, or `None`.

    A state that a task's episodes reach at different turns has no counter: its number may be a sum or a place.
    """

    def without(step: Step) -> str:
        return NUMBER.sub("#", step.key)

    by_key, by_text = returned_share(trajectories), returned_share(trajectories, without)
    if by_key is None or by_key > _HARDLY or by_text < _OFTEN:
        return None
    turns: dict[tuple[str, str], list[int]] = defaultdict(list)
    for trajectory in trajectories:
        first = {step.key: turn for turn, step in reversed([*enumerate(trajectory.steps)])}
        for key, turn in first.items():
            turns[trajectory.task_id, key].append(turn)
    shared = [len(set(reached)) > 1 for reached in turns.values() if len(reached) > 1]
    if sum(shared) > _HARDLY * len(shared):
        return None
    for trajectory in trajectories:
        seen: dict[str, str] = {}
        for step in trajectory.steps:
            before = seen.setdefault(without(step), step.key)
            if before != step.key:
                return NumberInKeys(by_key, by_text, different_parts(before, step.key))
    return None
