"""Which worker plays which episode.

What a game costs to prepare is often paid once a worker, so members of a group belong together. But a worker plays one
step at a time, and where steps are slow a group in one worker leaves the others idle. Measured times decide.

`load` is always the number of live episodes of each worker, and `hosts` the worker that plays most of a group.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

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

    def of_plan(
        self,
        homes: Sequence[int],
        groups: Sequence[Hashable],
        load: Sequence[int] = (),
        hosts: Mapping[Hashable, int] | None = None,
    ) -> float:
        """Seconds until these episodes are played, by the busiest of their workers: of the episodes that it plays
        already a half is left, on average."""
        steps = self.steps_per_episode * self.mean(STEP)
        seconds = Counter({worker: number * steps / 2 for worker, number in enumerate(load)})
        begun = {(home, group) for group, home in (hosts or {}).items()}
        for home, group in zip(homes, groups):
            seconds[home] += steps + self.mean(RESET if (home, group) in begun else FIRST_RESET)
            begun.add((home, group))
        return max((seconds[home] for home in set(homes)), default=0.0)


def together(
    groups: Sequence[Hashable],
    workers: int,
    load: Sequence[int] = (),
    hosts: Mapping[Hashable, int] | None = None,
) -> list[int]:
    """The worker of each episode, when all of a group have the same: the one that plays the group already, or else, in
    order of appearance, the least busy."""
    load, home = list(load) or [0] * workers, {}
    for group, size in Counter(groups).items():
        home[group] = (hosts or {}).get(group, load.index(min(load)))
        load[home[group]] += size
    return [home[group] for group in groups]


def divided(groups: Sequence[Hashable], workers: int, load: Sequence[int] = ()) -> list[int]:
    """The same, when all workers get equally busy: groups one after the other, cut into parts."""
    appeared = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(groups)), key=lambda place: appeared[groups[place]])
    homes = [0] * len(groups)
    for place, home in zip(order, sorted(least_busy(list(load) or [0] * workers, len(groups)))):
        homes[place] = home
    return homes


def place_episodes(
    groups: Sequence[Hashable],
    workers: int,
    times: MeasuredTimes,
    spread_groups: bool | None = None,
    load: Sequence[int] = (),
    hosts: Mapping[Hashable, int] | None = None,
) -> list[int]:
    """The worker of each episode.

    Args:
        spread_groups: divide groups, or keep them together; `None`: what is expected to take less time.
    """
    whole, parts = together(groups, workers, load, hosts), divided(groups, workers, load)
    if spread_groups is None:
        spread_groups = times.of_plan(parts, groups, load, hosts) < WORTHWHILE * times.of_plan(
            whole, groups, load, hosts
        )
    return parts if spread_groups else whole


def least_busy(load: Sequence[int], number: int) -> list[int]:
    """Workers for a number of episodes that belong nowhere."""
    queue = [(episodes, worker) for worker, episodes in enumerate(load)]
    heapq.heapify(queue)
    homes = []
    for _ in range(number):
        episodes, worker = queue[0]
        homes.append(worker)
        heapq.heapreplace(queue, (episodes + 1, worker))
    return homes
