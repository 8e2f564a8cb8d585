"""The state graph of a group of trajectories: its nodes are states, its edges are steps.

    trajectory 0   hall ──▶ kitchen ──▶ fridge ──▶ ◉ 10
    trajectory 1   hall ──▶ kitchen ──▶ hall ──▶ bedroom ──▶ ◉ 0

A *node* is a state that a trajectory of the group visited. An *edge* is a step, from the node in which it was taken
to the next node. This group has four nodes; `hall` is visited three times. Each trajectory ends in a terminal
node (◉) of its own, of value R, the episode's reward.

- Two steps are in the same node if they belong to the same group and their keys (`Step.key`) are equal. Groups never
  mix: the same text under two tasks is two nodes.
- Keys are compared by a 128-bit hash, so that ranks exchange no texts.
- Step j of T has the return gamma^(T-j+1) R; the last step (j = T) has gamma R. The value of a node is the mean return
  over all its visits; a trajectory that loops visits it several times (the paper's V). With `value_lambda` < 1 it is
  the mean of lambda-returns, see `values.py`.
- A trajectory without steps has no node. If it failed with a `failure_reason` (its first prompt could not be made to
  fit), it counts in A_EP's statistics with its reward; otherwise it is refused.
- A trajectory with outcome `"error"` or `"lost"` is not *counted*: its steps keep their places in the arrays, but are
  in no node (-1) and have return 0.

The graph is built from trajectories, before any batching: it contains no padding and no copies of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from numbers import Real

import numpy as np
import xxhash

from ..trajectory import UNCOUNTED, Trajectory
from ..utils.options import require
from .values import lambda_returns, lambda_values


def hash_key(key: str) -> bytes:
    """Return the 128-bit hash of a state key, which distinguishes nodes: see `StateGraph.node_keys`."""
    return xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class TrajectoryRecord:
    """The data of a trajectory that a graph needs: small and picklable, for groups spread over ranks.

    Args:
        task_id: id of the task.
        keys: hash of each step's state key, 16 bytes.
        valid: for each step, whether its completion had the required format.
        reward, outcome, failure_reason: as in `Trajectory`.
        actions: hash of each step's action, 8 bytes; `None` if not needed.
    """

    task_id: str
    keys: list[bytes]
    valid: list[bool]
    reward: float
    outcome: str
    failure_reason: str | None = None
    actions: list[bytes] | None = None

    @property
    def counted(self) -> bool:
        """Whether the trajectory has a result, as `Trajectory.counted`."""
        return self.outcome not in UNCOUNTED


def record(trajectory: Trajectory, with_actions: bool = False) -> TrajectoryRecord:
    """Return the record of a trajectory, with its keys and, if `with_actions`, its actions hashed."""
    # `Step.key` is inlined: most of the time from trajectories to advantages is spent here.
    digest = xxhash.xxh3_128_digest
    keys = [step.observation if step.state_key is None else step.state_key for step in trajectory.steps]
    return TrajectoryRecord(
        trajectory.task_id,
        [digest(key.encode("utf-8", "surrogatepass")) for key in keys],  # `hash_key`
        [bool(step.valid) for step in trajectory.steps],
        float(trajectory.reward),
        trajectory.outcome,
        trajectory.failure_reason,
        [xxhash.xxh3_64_digest(step.compared_action.encode("utf-8", "surrogatepass")) for step in trajectory.steps]
        if with_actions
        else None,
    )


@dataclass(frozen=True, eq=False)
class StateGraph:
    """The graphs of all groups of a batch, as flat arrays. Made by `from_groups` or `from_records`.

    S steps and M trajectories, in the order given: groups, then trajectories, then steps. N nodes, in the order of
    their first visit.

    Args:
        gamma: discount.
        value_lambda: 1: values are mean returns. Below 1: mean lambda-returns, which use the values of the next
            states.
        num_groups: number of groups.
        node: (S,) node in which a step was taken; -1 if not counted.
        next_node: (S,) node that it led to; N + m for the end of trajectory m; -1 if not counted.
        trajectory, group: (S,) trajectory and group of a step.
        position: (S,) index of a step in its trajectory, from 0.
        valid: (S,) bool, whether the completion had the required format.
        counted: (S,) bool, whether the step's trajectory is counted.
        returns: (S,) gamma^(T-j+1) R with j = position + 1, for any `value_lambda`; 0 if not counted.
        rewards: (M,) R; 0 if not counted.
        lengths: (M,) T, number of steps.
        trajectory_group: (M,) group of a trajectory.
        trajectory_counted: (M,) bool, whether it is counted.
        trajectory_success: (M,) bool, whether its outcome is `"success"`.
        node_values: (N + M,) value of each node, then of the end of each trajectory (R).
        node_group: (N,) group of a node.
        node_visits: (N,) number of steps taken in a node.
        node_keys: (N, 2) uint64, hash of a node's state key: `node_keys[n].tobytes() == hash_key(key)`.
        action: (S,) uint64, equal for equal actions; `None` unless all records have actions.
    """

    gamma: float
    value_lambda: float
    num_groups: int
    node: np.ndarray
    next_node: np.ndarray
    trajectory: np.ndarray
    group: np.ndarray
    position: np.ndarray
    valid: np.ndarray
    counted: np.ndarray
    returns: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    trajectory_group: np.ndarray
    trajectory_counted: np.ndarray
    trajectory_success: np.ndarray
    node_values: np.ndarray
    node_group: np.ndarray
    node_visits: np.ndarray
    node_keys: np.ndarray
    action: np.ndarray | None

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Sequence[Trajectory]],
        gamma: float = 0.95,
        value_lambda: float = 1.0,
        with_actions: bool = False,
    ) -> StateGraph:
        """Build the graph of groups of trajectories.

        Args:
            groups: for each group, its trajectories, all of one task.
            gamma: discount, in (0, 1].
            value_lambda: in [0, 1].
            with_actions: also hash the actions.

        Raises:
            G2POError: if `gamma` or `value_lambda` is out of range; if there is no group, something is not a list of
                trajectories, or a group is empty or has several tasks; if a counted trajectory has a reward that is
                not finite, or no steps and no `failure_reason`.
        """
        for number, group in enumerate(groups):
            others = (
                [group] if isinstance(group, Trajectory) else [part for part in group if not hasattr(part, "steps")]
            )
            require(
                not others, f"groups[{number}]", others[:1], "pass a list of groups, lists of Trajectory of a task"
            )
        records = [[record(trajectory, with_actions) for trajectory in group] for group in groups]
        return cls.from_records(records, gamma, value_lambda)

    @classmethod
    def from_records(
        cls, groups: Sequence[Sequence[TrajectoryRecord]], gamma: float = 0.95, value_lambda: float = 1.0
    ) -> StateGraph:
        """Build the graph of groups of records. Raises the same errors as `from_groups`."""
        _check(groups, gamma, value_lambda)
        records = [r for group in groups for r in group]
        lengths = np.array([len(r.keys) for r in records], dtype=np.int64)
        trajectory_group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        trajectory_counted = np.array([r.counted for r in records], dtype=bool)
        rewards = np.array([r.reward if r.counted else 0.0 for r in records], dtype=np.float64)

        trajectory = np.repeat(np.arange(len(records)), lengths)
        group = trajectory_group[trajectory]
        counted = trajectory_counted[trajectory]
        position = np.arange(len(trajectory)) - (np.cumsum(lengths) - lengths)[trajectory]
        valid = np.fromiter(chain.from_iterable(r.valid for r in records), dtype=bool, count=len(trajectory))
        steps_left = lengths[trajectory] - position  # T - j + 1
        returns = np.where(counted, gamma**steps_left * rewards[trajectory], 0.0)

        keys = np.frombuffer(b"".join(chain.from_iterable(r.keys for r in records)), dtype=np.uint64).reshape(-1, 2)
        node = np.full(len(trajectory), -1)
        node[counted], node_group, node_keys = _number_nodes(group[counted], keys[counted])
        node_visits = np.bincount(node[counted], minlength=len(node_group))
        next_node = np.append(node[1:], -1)[: len(node)]  # of the following step, except for last steps
        next_node = np.where(steps_left == 1, len(node_group) + trajectory, next_node)
        next_node = np.where(counted, next_node, -1)
        node_values = np.concatenate([np.zeros(len(node_group)), rewards])
        if value_lambda < 1:
            node_values[: len(node_group)] = lambda_values(
                node[counted], next_node[counted], rewards, node_group, gamma, value_lambda
            )
        else:
            sums = np.bincount(node[counted], returns[counted], minlength=len(node_group))
            node_values[: len(node_group)] = sums / node_visits
        return cls(
            gamma=gamma,
            value_lambda=value_lambda,
            num_groups=len(groups),
            node=node,
            next_node=next_node,
            trajectory=trajectory,
            group=group,
            position=position,
            valid=valid,
            counted=counted,
            returns=returns,
            rewards=rewards,
            lengths=lengths,
            trajectory_group=trajectory_group,
            trajectory_counted=trajectory_counted,
            trajectory_success=np.array([r.outcome == "success" for r in records], dtype=bool),
            node_values=node_values,
            node_group=node_group,
            node_visits=node_visits,
            node_keys=node_keys,
            action=_actions(records),
        )

    @property
    def num_steps(self) -> int:
        return len(self.node)

    @property
    def num_nodes(self) -> int:
        """N, the nodes of all groups, without the ends of trajectories."""
        return len(self.node_group)

    @property
    def values(self) -> np.ndarray:
        """(S,) V(s_j), value of the node in which a step was taken; 0 if not counted."""
        return np.where(self.counted, self.node_values[self.node], 0.0)

    @property
    def next_values(self) -> np.ndarray:
        """(S,) V(s_{j+1}), value of the node that a step led to; R for a last step; 0 if not counted."""
        return np.where(self.counted, self.node_values[self.next_node], 0.0)

    @cached_property
    def lambda_returns(self) -> np.ndarray:
        """(S,) the returns whose means are the values; equal to `returns` if `value_lambda` is 1; 0 if not counted."""
        if self.value_lambda == 1:
            return self.returns
        found, used = np.zeros(self.num_steps), self.counted
        last = self.next_node[used] >= self.num_nodes
        found[used] = lambda_returns(self.node_values[self.next_node[used]], last, self.gamma, self.value_lambda)
        return found

    @property
    def next_lambda_returns(self) -> np.ndarray:
        """(S,) lambda-return of the next step of the same trajectory; R for a last step; 0 if not counted."""
        following = np.append(self.lambda_returns[1:], 0.0)[: self.num_steps]
        last = self.next_node >= self.num_nodes
        return np.where(self.counted, np.where(last, self.rewards[self.trajectory], following), 0.0)

    def statistics(self) -> dict[str, float]:
        """Return the logged statistics, over the counted steps.

        Returns:
            `nodes`: nodes of all groups.
            `mean_group_size`: mean number of visits of a node.
            `singleton_step_fraction`: fraction of steps in nodes with one visit, which are compared with no other.
            `value_std_within_node`: standard deviation of the returns within a node (root mean square over steps), in
                units of reward: the part of their variance that only a finer key could explain.
        """
        num_steps = int(self.counted.sum())
        if num_steps == 0:
            return dict.fromkeys(("nodes", "mean_group_size", "singleton_step_fraction", "value_std_within_node"), 0.0)
        mean_return = np.bincount(self.node[self.counted], self.returns[self.counted]) / self.node_visits
        distance = self.returns[self.counted] - mean_return[self.node[self.counted]]
        return {
            "nodes": float(self.num_nodes),
            "mean_group_size": num_steps / self.num_nodes,
            "singleton_step_fraction": float((self.node_visits == 1).sum()) / num_steps,
            "value_std_within_node": float(np.sqrt(np.mean(distance**2))),
        }


def _number_nodes(group: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the node of each step, numbered by first visit, and group and key of each node."""
    order = np.lexsort((keys[:, 1], keys[:, 0], group))  # stable: equal keys stay in the order of their visits
    rows = np.column_stack([group.astype(np.uint64), keys])[order]
    starts = np.append(True, (rows[1:] != rows[:-1]).any(axis=1))[: len(rows)]
    first_visit = order[starts]
    number = np.empty(len(first_visit), dtype=np.int64)
    number[np.argsort(first_visit)] = np.arange(len(first_visit))
    node = np.empty(len(rows), dtype=np.int64)
    node[order] = number[np.cumsum(starts) - 1]
    first_visit = np.sort(first_visit)
    return node, group[first_visit], keys[first_visit]


def _actions(records: Sequence[TrajectoryRecord]) -> np.ndarray | None:
    if any(r.actions is None for r in records):
        return None
    return np.frombuffer(b"".join(chain.from_iterable(r.actions for r in records)), dtype=np.uint64)


def _check(groups: Sequence[Sequence[TrajectoryRecord]], gamma: float, value_lambda: float) -> None:
    require(0 < gamma <= 1, "gamma", gamma, "set it to a number above 0 and at most 1")
    is_weight = isinstance(value_lambda, Real) and 0 <= value_lambda <= 1
    require(is_weight, "value_lambda", value_lambda, "set it to a number of 0 to 1: 1 for mean returns (the paper)")
    require(len(groups) > 0, "groups", groups, "a graph needs at least one group of trajectories")
    for number, group in enumerate(groups):
        tasks = sorted({r.task_id for r in group})
        require(len(tasks) == 1, f"groups[{number}]", tasks, "a group has one trajectory or more, all of one task")
        for place, r in enumerate(group):
            name = f"groups[{number}][{place}]"
            if r.counted:
                has_result = bool(r.keys or r.failure_reason)
                remedy = "an episode that could not start has outcome 'error', or a failure_reason"
                require(has_result, f"{name}.steps", [], remedy)
                require(math.isfinite(r.reward), f"{name}.reward", r.reward, "it must be finite")
