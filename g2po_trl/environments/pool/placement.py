"""Assign episodes to workers, so that all are equally busy and few tasks are prepared in more than one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def least_busy(load: Sequence[int], number: int) -> list[int]:
    """Return workers for `number` episodes, each the least busy at its turn. `load`: running episodes of each."""
    load, homes = list(load), []
    for _ in range(number):
        homes.append(load.index(min(load)))
        load[homes[-1]] += 1
    return homes


def place_groups(groups: Sequence[Hashable], load: Sequence[int]) -> list[int]:
    """Return the worker of each episode: groups in order, cut into parts.

    Idle workers cut at most `len(load) - 1` groups.
    """
    appeared = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(groups)), key=lambda place: appeared[groups[place]])
    homes = [0] * len(groups)
    for place, home in zip(order, sorted(least_busy(load, len(groups)))):
        homes[place] = home
    return homes
