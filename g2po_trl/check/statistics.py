"""How often states recur, in groups and within episodes, and whether a number in their keys prevents it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from ..credit.state_keys import NUMBER
from ..trajectory import Step, Trajectory
from ..utils.show import different_parts

_own_key = attrgetter("key")
_HARDLY, _OFTEN = 0.02, 0.1  # of steps that return to a state of their episode


def shared_steps(groups: Sequence[Sequence[Trajectory]], key: Callable[[Step], str] = _own_key) -> list[bool]:
    """Return, for each step of an episode with a result, whether another episode of the group visited its state."""
    shared: list[bool] = []
    for group in groups:
        episodes = [list(map(key, trajectory.steps)) for trajectory in group if trajectory.counted]
        visits = Counter(name for episode in episodes for name in set(episode))
        shared += [visits[name] > 1 for episode in episodes for name in episode]
    return shared


def shared_share(groups: Sequence[Sequence[Trajectory]], key: Callable[[Step], str] = _own_key) -> float:
    """Return the share of `shared_steps`; 0 without steps."""
    shared = shared_steps(groups, key)
    return sum(shared) / len(shared) if shared else 0.0


def returned_share(trajectories: Iterable[Trajectory], key: Callable[[Step], str] = _own_key) -> float | None:
    """Return the share of later steps whose state the same episode had visited before; `None` without later steps."""
    steps = returned = 0
    for trajectory in trajectories:
        keys = list(map(key, trajectory.steps))
        steps += max(0, len(keys) - 1)
        returned += len(keys) - len(set(keys))
    return returned / steps if steps else None


def count_in_keys(trajectories: Sequence[Trajectory]) -> str | None:
    """Return a sentence on the number in the keys that makes each state of an episode new, such as a step counter.

    A state that a task's episodes reach at different turns has no counter: its number may be a sum or a place.
    """

    def without(step: Step) -> str:
        return NUMBER.sub("#", step.key)

    by_key, by_text = returned_share(trajectories), returned_share(trajectories, without)
    if by_key is None or by_key > _HARDLY or by_text < _OFTEN:
        return None
    turns, alike = defaultdict(list), defaultdict(list)  # first ones of each state; keys that differ in numbers alone
    for number, trajectory in enumerate(trajectories):
        for key, turn in {step.key: turn for turn, step in reversed([*enumerate(trajectory.steps)])}.items():
            turns[trajectory.task_id, key].append(turn)
        for step in trajectory.steps:
            alike[number, without(step)].append(step.key)
    differ = [len(set(reached)) > 1 for reached in turns.values() if len(reached) > 1]
    if sum(differ) > _HARDLY * len(differ):
        return None
    pairs = ((keys[0], key) for keys in alike.values() for key in keys if key != keys[0])
    parts = " and ".join(map(repr, different_parts(*next(pairs))))
    shares = f"{by_key:.0%} of steps return to a state of their episode, and {by_text:.0%}"
    return f"{shares} would if keys had no numbers, as {parts}"
