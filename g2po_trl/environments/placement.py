"""Which worker plays which episode.

What a game costs to prepare is often paid once a worker, so members of a group belong together. But a worker plays one
step at a time, and where steps are slow a group in one worker leaves the others idle. Measured times decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

FIRST_RESET, RESET, STEP = "first reset of a group in a worker", "reset", "step"
WORTHWHILE = 0.95  # groups are divided when that takes less than this share of the time


class MeasuredTimes:
    """Mean seconds of resets and steps; recent ones count more. Begins with a guess, which any measurement outweighs
    soon: preparing a game costs 1 s, resetting it again 0.1 s, each of 20 steps 10 ms."""

    def __init__(self):
        self._sums = {FIRST_RESET: (1.0, 1.0), RESET: (0.1, 1.0), STEP: (0.4, 40.0)}  # seconds, number

    def add(self, kind: str, seconds: float) -> None:
        total, number = self._sums[kind]
        self._sums[kind] = total + seconds, number + 1

    def age(self) -> None:
        """Let what was measured so far count half."""
        self._sums = {kind: (total / 2, number / 2) for kind, (total, number) in self._sums.items()}

    def mean(self, kind: str) -> float:
        total, number = self._sums[kind]
        return total / number

    @property
    def steps_per_episode(self) -> float:
        return self._sums[STEP][1] / (self._sums[FIRST_RESET][1] + self._sums[RESET][1])

    def of_plan(self, homes: Sequence[int], groups: Sequence[int]) -> float:
        """Seconds the busiest worker needs to play these episodes."""
        steps = self.steps_per_episode * self.mean(STEP)
        load: Counter[int] = Counter()
        begun = set()
        for home, group in zip(homes, groups):
            load[home] += steps + self.mean(RESET if (home, group) in begun else FIRST_RESET)
            begun.add((home, group))
        return max(load.values(), default=0.0)


def together(groups: Sequence[int], workers: int) -> list[int]:
    """The worker of each episode, when all of a group have the same: in order of appearance, to the least busy."""
    load, home = [0] * workers, {}
    for group, size in Counter(groups).items():
        home[group] = load.index(min(load))
        load[home[group]] += size
    return [home[group] for group in groups]


def divided(groups: Sequence[int], workers: int) -> list[int]:
    """The same, when all workers get as many episodes: groups one after the other, cut into equal parts."""
    appeared = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(groups)), key=lambda slot: appeared[groups[slot]])
    homes = [0] * len(groups)
    for place, slot in enumerate(order):
        homes[slot] = place * workers // len(groups) if len(groups) > workers else place
    return homes


def place_episodes(
    groups: Sequence[int], workers: int, times: MeasuredTimes, spread_groups: bool | None = None
) -> list[int]:
    """The worker of each episode.

    Args:
        spread_groups: divide groups, or keep them together; `None`: what is expected to take less time.
    """
    whole, parts = together(groups, workers), divided(groups, workers)
    if spread_groups is None:
        spread_groups = times.of_plan(parts, groups) < WORTHWHILE * times.of_plan(whole, groups)
    return parts if spread_groups else whole


def least_busy(live: Sequence[int], workers: int, number: int) -> list[int]:
    """Workers for a number of episodes that need a new one; `live`: the worker of each other episode."""
    load = Counter(live)
    homes = []
    for _ in range(number):
        homes.append(min(range(workers), key=lambda index: load[index]))
        load[homes[-1]] += 1
    return homes
