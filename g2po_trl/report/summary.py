"""Summarise the state graphs of a run: rows, means and notes of `g2po report`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..credit.graph import StateGraph, record
from ..runs.iterations import Iteration
from ..runs.verdict import Tally, verdict
from ..trajectory import Trajectory
from . import state_key_test as keys


def analyse(iterations: Sequence[Iteration], gamma: float | None, described: dict) -> dict:
    """Return the contents of analysis.json.

    `gamma`: `None`: the run's own, as its run.json (`described`) says.
    """
    gamma = gamma_of(described) if gamma is None else gamma
    rows = [
        {
            "iteration": iteration.number,
            "gamma": gamma,
            "unfinished": iteration.unfinished,
            "steps": int(graph.counted.sum()),
            "nodes": graph.num_nodes,
            "group_size": group_size(graph),
        }
        for iteration in iterations
        for graph in [iteration.graph(gamma)]
    ]
    prediction = keys.examine(*keys.measure(iterations, gamma))
    return {"gamma": gamma, "iterations": rows, "prediction": prediction}


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
    """Return what the run said at its end if there was nothing to learn from, of the iterations that are here.

    A log was not trained on: `None`. `replaced`: trajectories of the groups that dynamic sampling replaced.
    """
    if "traces" in run:
        return None
    tally = Tally()
    for iteration in iterations:
        everyone = [t for group in iteration.groups for t in group]
        tally.add([[record(t) for t in group] for group in iteration.groups], everyone)
    tally.add([], replaced, [record(t) for t in replaced])
    return verdict(tally, run.get("estimator", {}).get("estimator_name", "g2po"))


def notes(run: dict) -> list[str]:
    """Return warnings about values of a run that was not trained by G2PO with mean returns."""
    if "traces" in run:
        return ["These are means over the returns of the log; value_lambda is an option of training."]
    name = run.get("estimator", {}).get("estimator_name", "g2po")
    used = run.get("trainer", {}).get("value_lambda", 1.0)
    said = [] if name.startswith("g2po") else [f"The run was trained with {name}: value_lambda is an option of g2po."]
    if used != 1:
        said.append(f"The run was trained with value_lambda {used}; all but the test of keys is about mean returns.")
    return said


def summary(rows: list[dict], run: dict) -> str:
    """Return a run in a few lines: means over its iterations (`rows` of analysis.json). `run`: its run.json."""
    unfinished = sum(row["unfinished"] for row in rows)
    lines = [f"{unfinished} lines were not written to their end and are left out"] if unfinished else []
    lines.append(_what(run, len(rows), sum(row["steps"] for row in rows)))
    if sizes := [row["group_size"] for row in rows if row["steps"]]:
        mean, of_step, once = (np.mean([size[name] for size in sizes]) for name in sizes[0])
        lines.append(
            f"visits of a node: {mean:.1f} (of a mean step's node: {of_step:.1f}); {100 * once:.1f} % of steps in a "
            "node visited once"
        )
    return "\n".join(lines)


def _what(run: dict, iterations: int, steps: int) -> str:
    if "traces" not in run:
        return f"{iterations} iterations, {steps} steps"
    file, name = run["traces"]["file"], run.get("estimator", {}).get("estimator_name", "g2po")
    return f"logged runs of {file}, credited with {name} and not trained on: {steps} calls of episodes with a result"
