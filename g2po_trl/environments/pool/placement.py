"""Assign episodes to workers.

Preparing a game often costs time once per worker, which favours one worker per group. But a worker plays one step at a
time, so with slow steps a group in one worker leaves the others idle. Measured times decide.

Throughout, `load` is the number of running episodes of each worker, and `hosts` maps a group to the worker that plays
most of its episodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

FIRST_RESET, RESET, STEP = "first reset of a group in a worker", "reset", "step"
SPLIT_BELOW = 0.95  # groups are split if that takes less than this share of the time


class MeasuredTimes:
    """Running means of the seconds of resets and steps.

    The initial guess has the weight of one episode or two: 1 s to prepare a game, 0.1 s to reset it again, 10 ms for
    each of 20 steps.
    """

    def __init__(self):
        self._sums = {FIRST_RESET: (1.0, 1.0), RESET: (0.1, 1.0), STEP: (0.4, 40.0)}  # seconds, number

    def add(self, kind: str, seconds: float) -> None:
        total, number = self._sums[kind]
        self._sums[kind] = total + seconds, number + 1

    def age(self) -> None:
        """Halve the weight of all measurements so far."""
        self._sums = {kind: (total / 2, number / 2) for kind, (total, number) in self._sums.items()}

    def mean(self, kind: str) -> float:
        total, number = self._sums[kind]
        return total / number

    @property
    def steps_per_episode(self) -> float:
        return self._sums[STEP][1] / (self._sums[FIRST_RESET][1] + self._sums[RESET][1])

    def busiest_seconds(
        self,
        homes: Sequence[int],
        groups: Sequence[Hashable],
        load: Sequence[int] = (),
        hosts: Mapping[Hashable, int] | None = None,
    ) -> float:
        """Return the seconds that the busiest worker needs for these episodes and half of its running ones."""
        steps = self.steps_per_episode * self.mean(STEP)
        seconds = Counter({worker: number * steps / 2 for worker, number in enumerate(load)})
        prepared = {(home, group) for group, home in (hosts or {}).items()}
        for home, group in zip(homes, groups):
            seconds[home] += steps + self.mean(RESET if (home, group) in prepared else FIRST_RESET)
            prepared.add((home, group))
        return max((seconds[home] for home in set(homes)), default=0.0)


def keep_groups(
    groups: Sequence[Hashable],
    workers: int,
    load: Sequence[int] = (),
    hosts: Mapping[Hashable, int] | None = None,
) -> list[int]:
    """Return the worker of each episode with whole groups: the group's host, else the least busy worker."""
    load, home = list(load) or [0] * workers, {}
    for group, size in Counter(groups).items():
        home[group] = (hosts or {}).get(group, load.index(min(load)))
        load[home[group]] += size
    return [home[group] for group in groups]


def split_groups(groups: Sequence[Hashable], workers: int, load: Sequence[int] = ()) -> list[int]:
    """Return the worker of each episode with equally busy workers: groups in order, split into parts."""
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
    """Return the worker of each episode. `spread_groups=None`: split groups if that is expected to take less time."""
    whole, parts = keep_groups(groups, workers, load, hosts), split_groups(groups, workers, load)
    if spread_groups is None:
        spread_groups = times.busiest_seconds(parts, groups, load, hosts) < SPLIT_BELOW * times.busiest_seconds(
            whole, groups, load, hosts
        )
    return parts if spread_groups else whole


def least_busy(load: Sequence[int], number: int) -> list[int]:
    """Return workers for `number` episodes, each the least busy at its turn."""
    queue = [(episodes, worker) for worker, episodes in enumerate(load)]
    heapq.heapify(queue)
    homes = []
    for _ in range(number):
        episodes, worker = queue[0]
        homes.append(worker)
        heapq.heapreplace(queue, (episodes + 1, worker))
    return homes
