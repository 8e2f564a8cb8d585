"""The paper's analyses of trajectories, as functions of graphs.

- `value_variation`: how much do returns from one state differ from trajectory to trajectory? What a mean over its
  visits has to average out.
- `group_sizes`: how many visits share a node?
- `turns_to_finish`: how long is a way to the goal?
- `value_errors`: how exact are V and delta = V(s') - V(s) really? For returns that are independent draws, as the paper
  assumes, Var V = sigma^2 / |G| and Var delta = sigma^2 / |G| + sigma'^2 / |G'|. Real visits share trajectories;
  `value_errors` measures what that does to both variances, and `simulate_variances` draws the assumed case.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..credit.graph import StateGraph
from ..trajectory import Trajectory, read_unfinished
from ..utils.iteration_log import IterationLog
from ..utils.json import read_json_lines


@dataclass(frozen=True)
class Iteration:
    """One rollout of a run.

    Args:
        number: of the iteration, from 1.
        groups: for each group, its trajectories.
        unfinished: lines of its files that were not written to their end, and are left out.
    """

    number: int
    groups: list[list[Trajectory]]
    unfinished: int = 0

    def graph(self, gamma: float = 0.95) -> StateGraph:
        """Its state graph."""
        return StateGraph.from_groups(self.groups, gamma)


def load_iterations(run: str | Path, name: str = "train") -> list[Iteration]:
    """Read a run's trajectories, of all ranks; `name`: "train" or an evaluation's. Raises `ValueError` without any."""
    files = _files(run, name)
    if not files:
        raise ValueError(
            f"{str(run)!r} holds no trajectories/{name}-*.jsonl: pass the output_dir of a run with save_trajectories"
        )
    return [_read_iteration(number, paths) for number, paths in sorted(files.items())]


def load_iteration(run: str | Path, number: int, name: str = "train") -> Iteration:
    """Read one of them. Raises `KeyError` when the run has no such iteration."""
    files = _files(run, name)
    if number not in files:
        raise KeyError(f"{str(run)!r} has no trajectories of iteration {number}; there are {sorted(files)}")
    return _read_iteration(number, files[number])


def load_replaced(run: str | Path) -> list[Trajectory]:
    """Return the trajectories of all groups that dynamic sampling replaced by others; empty without any."""
    read = [_read_iteration(number, paths) for number, paths in sorted(_files(run, "replaced").items())]
    return [trajectory for iteration in read for group in iteration.groups for trajectory in group]


def load_log(run: str | Path) -> list[dict[str, Any]]:
    """Return the logged metrics of each iteration so far.

    Older versions wrote no log.jsonl: those of the newest checkpoint, or of the end of the run. A file that cannot be
    read is left out, with a warning: a kill or a full disk cut it.
    """
    path = Path(run) / "log.jsonl"
    history = read_json_lines(path) if path.is_file() else _newest_history(run)
    log = IterationLog()
    return [*(entry for line in history for entry in log.add(line)), *log.close()]


def _newest_history(run: str | Path) -> list[dict[str, Any]]:
    """Return the log history of the newest trainer_state.json."""
    states = [*Path(run).glob("checkpoint-*/trainer_state.json"), *Path(run).glob("trainer_state.json")]
    newest: dict[str, Any] = {"global_step": -1, "log_history": []}
    for path in states:
        try:
            state = json.loads(path.read_bytes())
            newest = state if state["global_step"] > newest["global_step"] else newest
        except FileNotFoundError:  # an old checkpoint that the run has just deleted
            continue
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}), and is left out", stacklevel=2)
    return newest["log_history"]


def _files(run: str | Path, name: str) -> dict[int, list[Path]]:
    files: dict[int, list[Path]] = {}
    for path in sorted(Path(run, "trajectories").glob("*.jsonl")):
        if found := re.fullmatch(rf"{re.escape(name)}-(\d+)(-rank\d+)?", path.stem):  # not the panel train-hard
            files.setdefault(int(found[1]), []).append(path)
    return files


def _read_iteration(number: int, paths: Sequence[Path]) -> Iteration:
    groups: dict[Any, list[Trajectory]] = {}  # by task in files that do not number groups
    unfinished = 0
    for trajectory in (trajectory for path in paths for trajectory in read_unfinished(path)):
        if trajectory is None:
            unfinished += 1
            continue
        name = trajectory.task_id if trajectory.group is None else trajectory.group
        groups.setdefault(name, []).append(trajectory)
    return Iteration(number, list(groups.values()), unfinished)


def value_variation(graph: StateGraph) -> dict[str, float | np.ndarray]:
    """How much returns vary within a state.

    Returns:
        `varying_share`: of the states visited more than once, the fraction with unequal returns.
        `varying_step_share`: fraction of all steps in such a state.
        `deviations`: (number of such states,) sample standard deviation of their returns, in units of reward.
        `mean_deviation`: mean standard deviation over the steps in states visited more than once.
    """
    visits, squares = graph.node_visits, _square_sums(graph)
    several = visits > 1
    deviation = np.sqrt(squares / np.maximum(visits - 1, 1))
    varying = several & (deviation > 1e-9 * max(1.0, np.abs(graph.rewards).max(initial=0)))
    return {
        "varying_share": _share(varying.sum(), several.sum()),
        "varying_step_share": _share(visits[varying].sum(), visits.sum()),
        "mean_deviation": _share((deviation * visits)[several].sum(), visits[several].sum()),
        "deviations": deviation[varying],
    }


def group_sizes(graph: StateGraph) -> dict[str, float | np.ndarray]:
    """Visits per state.

    Returns:
        `mean`: over states.
        `mean_of_step`: over steps.
        `singleton_nodes`, `singleton_steps`: fraction of states visited once, and of steps in one.
        `sizes`: (N,) visits of each state.
    """
    visits = graph.node_visits
    return {
        "mean": _share(visits.sum(), len(visits)),
        "mean_of_step": _share((visits**2).sum(), visits.sum()),
        "singleton_nodes": _share((visits == 1).sum(), len(visits)),
        "singleton_steps": _share((visits == 1).sum(), visits.sum()),
        "sizes": visits,
    }


def turns_to_finish(trajectories: Iterable[Trajectory]) -> np.ndarray:
    """Return the number of steps of each successful episode."""
    return np.array([len(t.steps) for t in trajectories if t.success], dtype=np.int64)


def value_errors(graph: StateGraph) -> dict[str, float]:
    """Variances of V and delta as estimated from one group: under the paper's assumptions, and from its trajectories.

    The assumption: returns of a node's visits are independent draws, and V(s') shares none with V(s). But a trajectory
    that visits a node twice gives two returns that rise and fall together, and one that takes an edge is part of both
    its ends. So each trajectory is one draw here: its influence on V (on delta) is what V (delta) would move without
    it, and the variance is that of a sum of such influences.

    Returns:
        `value_variance`, `value_variance_assumed`: means over nodes of several trajectories; `value_ratio`: the first
        by the second; `edge_variance`, `edge_variance_assumed`, `edge_ratio`: the same for delta, over distinct edges
        that join two such nodes; `revisit_share`: share of steps in a node that their trajectory was in before;
        `shared_share`: mean share of the trajectories through the smaller end of such an edge that are in both ends.
    """
    used = graph.counted
    node, trajectory = graph.node[used], graph.trajectory[used]
    distance = (graph.returns - graph.values)[used]
    # One row for each (node, trajectory): the trajectory's influence on the node's value.
    num_trajectories = len(graph.rewards)
    pair, row = np.unique(node * num_trajectories + trajectory, return_inverse=True)
    pair_node, pair_trajectory = pair // num_trajectories, pair % num_trajectories
    influence = np.bincount(row, distance, minlength=len(pair)) / graph.node_visits[pair_node]

    members = np.bincount(pair_node, minlength=graph.num_nodes)
    several = (members > 1) & (graph.node_visits > 1)
    correction = members / np.maximum(members - 1, 1)
    variance = np.bincount(pair_node, influence**2, minlength=graph.num_nodes) * correction
    assumed = _square_sums(graph) / np.maximum(graph.node_visits - 1, 1) / graph.node_visits

    of_node: list[dict[int, float]] = [{} for _ in range(graph.num_nodes)]
    for n, t, value in zip(pair_node.tolist(), pair_trajectory.tolist(), influence.tolist()):
        of_node[n][t] = value
    edge_variance, edge_assumed, shared = [], [], []
    inner = used & (graph.next_node < graph.num_nodes) & (graph.next_node != graph.node)
    for here, there in np.unique(np.column_stack([graph.node[inner], graph.next_node[inner]]), axis=0).tolist():
        if not (several[here] and several[there]):
            continue
        before, after = of_node[here], of_node[there]
        together = before.keys() | after.keys()
        squares = sum((after.get(t, 0.0) - before.get(t, 0.0)) ** 2 for t in together)
        edge_variance.append(squares * len(together) / (len(together) - 1))
        edge_assumed.append(assumed[here] + assumed[there])
        shared.append(len(before.keys() & after.keys()) / min(len(before), len(after)))
    return {
        "value_variance": _mean(variance[several]),
        "value_variance_assumed": _mean(assumed[several]),
        "value_ratio": _share(variance[several].sum(), assumed[several].sum()),
        "edge_variance": _mean(edge_variance),
        "edge_variance_assumed": _mean(edge_assumed),
        "edge_ratio": _share(sum(edge_variance), sum(edge_assumed)),
        "revisit_share": _share(int(used.sum()) - len(pair), int(used.sum())),
        "shared_share": _mean(shared),
    }


def simulate_variances(
    sizes: Sequence[int], sigma: float = 1.0, shared: float = 0.0, trials: int = 20_000, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return the variances of V and delta over random groups of returns, and the paper's expressions for them.

    Args:
        sizes: visits |G| of the nodes at both ends of an edge.
        sigma: standard deviation of a return.
        shared: fraction of the returns at one end that are also returns at the other, as when a trajectory takes the
            edge.
        trials: number of random groups.
        seed: of the random groups.

    Returns:
        Arrays over sizes: `value` (measured Var V), `value_expected` (sigma^2 / |G|), `edge` (measured Var delta),
        `edge_expected` (2 sigma^2 / |G|, both ends independent) and `edge_bound` (4 sigma^2 / |G|, whatever they
        share).
    """
    rng = np.random.default_rng(seed)
    value, edge = [], []
    for size in sizes:
        here = rng.normal(0.0, sigma, (trials, size))
        there = rng.normal(0.0, sigma, (trials, size))
        common = round(shared * size)
        there[:, :common] = here[:, :common]
        value.append(here.mean(axis=1).var(ddof=1))
        edge.append((there.mean(axis=1) - here.mean(axis=1)).var(ddof=1))
    sizes = np.asarray(sizes, dtype=np.float64)
    return {
        "value": np.array(value),
        "value_expected": sigma**2 / sizes,
        "edge": np.array(edge),
        "edge_expected": 2 * sigma**2 / sizes,
        "edge_bound": 4 * sigma**2 / sizes,
    }


def _square_sums(graph: StateGraph) -> np.ndarray:
    """(N,) sum of squared distances of returns from their node's value."""
    used = graph.counted
    return np.bincount(graph.node[used], (graph.returns - graph.values)[used] ** 2, minlength=graph.num_nodes)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
