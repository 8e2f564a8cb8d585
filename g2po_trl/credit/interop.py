"""Advantages for other frameworks: lists in, one array per episode out; from steps to tokens (docs/elsewhere.md)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..trajectory import Step, Trajectory
from ..utils.options import require
from .estimators.g2po import g2po
from .estimators.registry import ESTIMATORS
from .graph import StateGraph


def step_advantages(
    keys: Sequence[Sequence[str]],
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    valid: Sequence[Sequence[bool]] | None = None,
    estimator: Callable[[StateGraph], np.ndarray] | str = g2po,
    **graph_options: Any,
) -> list[np.ndarray]:
    """Return the advantage of every step of M episodes, given in any order.

    Args:
        keys: for each episode, the state key of each step.
        rewards: (M,) total reward of each episode. `None`: no result. Its advantages are 0, and it is not compared
            with other episodes.
        groups: (M,) group of each episode. Episodes of a group have the same task and are compared.
        valid: for each episode, whether each step's completion had the required format. Default: all.
        estimator: any `StateGraph -> (S,)`, or the name of one of `ESTIMATORS` with its defaults; set options by
            `functools.partial`.
        **graph_options: `gamma` and `value_lambda` of `StateGraph.from_groups`.

    Returns:
        M arrays of float64, in the order given, each with one number per step.

    Raises:
        G2POError: for a key that is not a string, a string in place of a list, lists of unequal lengths, an unknown
            estimator, and the errors of `StateGraph.from_groups`.
    """
    for name, value in (("keys", keys), ("rewards", rewards), ("groups", groups), ("valid", valid)):
        is_text = isinstance(value, (str, bytes))
        is_text |= name in ("keys", "valid") and any(isinstance(episode, str) for episode in value or ())
        require(not is_text, name, value, "give a list with one entry per episode; of keys and valid, a list of steps")
    if isinstance(estimator, str):
        remedy = f"choose one of {', '.join(ESTIMATORS)}, or pass a function"
        require(estimator in ESTIMATORS, "estimator", estimator, remedy)
        estimator = ESTIMATORS[estimator].function
    keys = [list(episode) for episode in keys]
    groups = [group.item() if hasattr(group, "item") else group for group in groups]  # tensors are equal by identity
    valid = [[True] * len(episode) for episode in keys] if valid is None else [list(episode) for episode in valid]
    sizes = [len(keys), len(rewards), len(groups), len(valid)]
    remedy = "keys, rewards, groups and valid have one entry for every episode"
    require(len(set(sizes)) == 1, "number of episodes", sizes, remedy)
    if not keys:
        return []
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    trajectories = [
        _trajectory(number, *episode) for number, episode in enumerate(zip(keys, rewards, groups, valid, strict=True))
    ]
    graph = StateGraph.from_groups([[trajectories[m] for m in group] for group in members.values()], **graph_options)
    parts = np.split(estimator(graph), np.cumsum(graph.lengths)[:-1])
    order = [number for group in members.values() for number in group]
    return [part for _, part in sorted(zip(order, parts), key=lambda pair: pair[0])]


def spread_over_tokens(advantages: Sequence[float], mask: Sequence[int]) -> np.ndarray:
    """Spread the advantages of an episode's steps over the tokens of one row that holds the whole episode.

    Args:
        advantages: (S,) of the steps.
        mask: (T,) 1 for tokens of the model, 0 for all others; each run of ones is a step. Without ones, all
            advantages are 0.

    Returns:
        (T,) float64, 0 where `mask` is 0.

    Raises:
        G2POError: if the number of runs of ones is not S.
    """
    mask = np.asarray(mask) != 0
    first = mask & ~np.append(False, mask[:-1])
    if not mask.any():
        return np.zeros(len(mask))
    remedy = f"give each of {len(advantages)} steps a run of ones, with at least one token between two"
    require(first.sum() == len(advantages), "mask", mask.astype(int).tolist(), remedy)
    return np.where(mask, np.append(0.0, advantages)[np.cumsum(first)], 0.0)


def _trajectory(number: int, keys: list[str], reward: float | None, group: Hashable, valid: list[bool]) -> Trajectory:
    require(len(keys) == len(valid), f"valid[{number}]", valid, f"give one flag for each of {len(keys)} keys")
    others = [key for key in keys if not isinstance(key, str)]
    require(not others, f"keys[{number}]", others[:1], "give texts")
    steps = [Step(key, "", valid=bool(flag)) for key, flag in zip(keys, valid)]
    if reward is None:
        return Trajectory(str(group), steps, 0.0, "error")
    return Trajectory(str(group), steps, float(reward), "success" if reward > 0 else "failure")
