"""The numbers of a report: visits of states by iteration, the test of the state keys, the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from ..credit.graph import StateGraph, record
from ..runs.iterations import Iteration
from ..runs.metrics import Summary
from ..runs.verdict import Tally, verdict
from ..trajectory import Trajectory
from . import key_quality as keys
from .key_texts import hidden_example, key_texts
from .losses import losses


def analyse(iterations: Sequence[Iteration], gamma: float | None, described: dict) -> dict:
    """Return the contents of analysis.json.

    `gamma`: `None`: the run's own, from its run.json (`described`).
    """
    gamma = gamma_of(described) if gamma is None else gamma
    rows, hidden = [], []
    for iteration in iterations:
        graph = StateGraph.from_groups(iteration.groups, gamma, with_actions=True)
        sizes = {"steps": int(graph.counted.sum()), "nodes": graph.num_nodes, "group_size": group_size(graph)}
        rows.append({"iteration": iteration.number, "gamma": gamma, "unfinished": iteration.unfinished, **sizes})
        if example := hidden_example(graph, iteration.groups):
            hidden.append(example)
    return {
        "gamma": gamma,
        "iterations": rows,
        "prediction": keys.examine(*keys.measure(iterations, gamma)),
        "losses": losses(iterations, gamma),
        "key_texts": key_texts(group for iteration in iterations for group in iteration.groups),
        "hidden_example": max(hidden, key=lambda found: found["spread"], default=None),
    }


def group_size(graph: StateGraph) -> dict[str, float]:
    """Return visits of a node: `mean` over nodes, `mean_of_step` over steps, and the share of `singleton_steps`."""
    visits = graph.node_visits
    if not len(visits):
        return dict.fromkeys(("mean", "mean_of_step", "singleton_steps"), float("nan"))
    return {
        "mean": float(visits.mean()),
        "mean_of_step": float((visits**2).sum() / visits.sum()),
        "singleton_steps": float((visits == 1).sum() / visits.sum()),
    }


def gamma_of(described: dict) -> float:
    """Return the discount that a run was trained with, 0.95 if run.json has none."""
    return described.get("trainer", described.get("estimator", {})).get("gamma", 0.95)  # a log has no trainer


def verdict_on(iterations: Sequence[Iteration], run: dict, replaced: Sequence[Trajectory] = ()) -> str | None:
    """Return the verdict that a run prints if it had nothing to learn from, for these iterations.

    `None` for a log, which was not trained on. `replaced`: trajectories of the groups that dynamic sampling replaced.
    """
    if "traces" in run:
        return None
    tally = Tally()
    for iteration in iterations:
        everyone = [t for group in iteration.groups for t in group]
        tally.add([[record(t) for t in group] for group in iteration.groups], Summary.of(everyone))
    tally.add([], Summary.of(replaced))
    return verdict(tally, run.get("estimator", {}).get("estimator_name", "g2po"))
