"""The numbers of a report: visits of states by iteration, the test of the state keys."""

from __future__ import annotations

from collections.abc import Sequence

from ..credit.graph import StateGraph
from ..runs.iterations import Iteration
from . import key_quality as keys
from .key_texts import hidden_example
from .losses import losses


def analyse(iterations: Sequence[Iteration], gamma: float | None, described: dict) -> dict:
    """Return the contents of analysis.json. `gamma`: `None`: the run's own, from its run.json (`described`)."""
    if gamma is None:
        gamma = described.get("trainer", described.get("estimator", {})).get("gamma", 0.95)  # a log has no trainer
    graphs = [StateGraph.from_groups(iteration.groups, gamma, with_actions=True) for iteration in iterations]
    rows, hidden = [], []
    for iteration, graph in zip(iterations, graphs):
        facts = {"iteration": iteration.number, "unfinished": iteration.unfinished, "steps": int(graph.counted.sum())}
        rows.append(facts | graph.statistics())
        hidden.append(hidden_example(graph, iteration.groups))
    return {
        "gamma": gamma,
        "iterations": rows,
        "prediction": keys.examine(*keys.measure(iterations, graphs)),
        "losses": losses(iterations, graphs),
        "hidden_example": max(filter(None, hidden), key=lambda found: found["spread"], default=None),
    }
