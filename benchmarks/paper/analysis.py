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

from collections.abc import Iterable, Sequence

import numpy as np

from g2po_trl import StateGraph, Trajectory


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
