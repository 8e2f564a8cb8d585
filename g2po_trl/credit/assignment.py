"""From a rollout's trajectories to the graph of all ranks, and back to the advantages of one rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from ..trajectory import Step, Trajectory
from ..utils.options import require
from .graph import StateGraph, TrajectoryRecord, record
from .state_keys import assign_keys, keys_of_groups, make_state_key, merge_similar_keys, similarity_threshold


class Credit:
    """Settings of a run for state keys, graph and estimator, the same on every rank.

    Args:
        estimator: `StateGraph -> array(num_steps)`; `None` where advantages come from elsewhere (PPO's critic).
        gamma: discount.
        num_generations: trajectories of a group.
        value_lambda: λ of the node values, see `StateGraph.from_groups`.
        state_key: what counts as one state, see `g2po_trl.credit.state_keys`.
        state_key_ignores: details that keys leave out, see `NormalisedKey`.
        gather: concatenates a list over all ranks. `list` for one rank.
    """

    def __init__(
        self,
        estimator: Callable[[StateGraph], np.ndarray] | None,
        gamma: float,
        num_generations: int,
        value_lambda: float = 1.0,
        state_key: Callable[[Step], str] | str | None = None,
        state_key_ignores: Iterable[str] | None = None,
        gather: Callable[[list], list] = list,
    ):
        self.estimator, self.gamma, self.num_generations = estimator, gamma, num_generations
        self.value_lambda, self.gather = value_lambda, gather
        self.state_key, self.similarity = make_state_key(state_key, state_key_ignores), similarity_threshold(state_key)

    @classmethod
    def of(
        cls,
        args: Any,
        estimator: Callable[[StateGraph], np.ndarray] | None,
        state_key: Callable[[Step], str] | None = None,
        gather: Callable[[list], list] = list,
    ) -> Credit:
        """Return the settings among the attributes of `args`; a function `state_key` replaces that of `args`."""
        key = args.state_key if state_key is None else state_key
        return cls(estimator, args.gamma, args.num_generations, args.value_lambda, key, args.state_key_ignores, gather)

    def records(self, trajectories: Sequence[Trajectory], groups: Sequence[Hashable]) -> list[TrajectoryRecord]:
        """Set configured state keys of the steps, and return the records of all ranks' trajectories.

        They are ordered by rank, and within a rank by group.
        """
        if self.state_key is not None:
            assign_keys(trajectories, self.state_key)
        if self.similarity is not None:
            keys = self.gather([keys_of_groups(trajectories, groups)])
            merge_similar_keys(trajectories, groups, self.similarity, keys)
        return self.gather([record(trajectory) for trajectory in trajectories])

    def graph(self, records: Sequence[TrajectoryRecord]) -> StateGraph:
        """Return the graph of all ranks' groups, with values of the configured `value_lambda`."""
        return StateGraph.from_records(groups_of(records, self.num_generations), self.gamma, self.value_lambda)


def groups_of(records: Sequence[TrajectoryRecord], num_generations: int) -> list[Sequence[TrajectoryRecord]]:
    """Return the groups of all ranks' records, `num_generations` consecutive ones each."""
    return [records[i : i + num_generations] for i in range(0, len(records), num_generations)]


def advantages_of_rank(
    advantages: np.ndarray, records: Sequence[TrajectoryRecord], first: int, count: int
) -> np.ndarray:
    """Return the advantages of `count` trajectories, from number `first` of all ranks' `records` on."""
    ends = np.cumsum([0, *(len(record.keys) for record in records)])
    check_advantages(advantages, ends[-1])
    return advantages[ends[first] : ends[first + count]]


def check_advantages(advantages: np.ndarray, num_steps: int) -> None:
    """Refuse advantages other than one finite number per step."""
    remedy = f"return an array of one number per step, ({num_steps},)"
    require(advantages.shape == (num_steps,), "advantage_fn", advantages.shape, remedy)
    bad = advantages[~np.isfinite(advantages)]
    require(not len(bad), "advantage_fn", bad[:1].tolist(), f"{len(bad)} values are not finite")
