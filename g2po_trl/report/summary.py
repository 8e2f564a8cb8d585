"""Summarise the state graphs of a run: rows, means and notes of `g2po report`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..credit.graph import record
from ..runs.verdict import Tally, verdict
from ..trajectory import Trajectory
from . import analysis
from . import state_key_test as keys

SIZES = (1, 2, 4, 8, 16, 32)


def analyse(iterations: list[analysis.Iteration], gamma: float | None, described: dict) -> tuple[dict, dict]:
    """Return the contents of analysis.json, and further arrays for the plots.

    `gamma`: `None`: the run's own, as its run.json (`described`) says.
    """
    gamma = gamma_of(described) if gamma is None else gamma
    rows, sizes, deviations, turns = [], [], [], []
    for iteration in iterations:
        graph = iteration.graph(gamma)
        visited, varied = analysis.group_sizes(graph), analysis.value_variation(graph)
        won = analysis.turns_to_finish(t for group in iteration.groups for t in group)
        sizes.append(visited.pop("sizes"))
        deviations.append(varied.pop("deviations"))
        turns.append(won)
        rows.append(
            {
                "iteration": iteration.number,
                "gamma": gamma,
                "unfinished": iteration.unfinished,
                "steps": int(graph.counted.sum()),
                "nodes": graph.num_nodes,
                "group_size": visited,
                "value_variation": varied,
                "value_errors": analysis.value_errors(graph),
                "turns_to_finish": float(won.mean()) if len(won) else None,
            }
        )
    prediction = keys.examine(*keys.measure(iterations, gamma), [iteration.number for iteration in iterations])
    return {"gamma": gamma, "iterations": rows, "prediction": prediction}, {
        "sizes": np.concatenate(sizes),
        "deviations": np.concatenate(deviations),
        "turns": turns,
    }


def gamma_of(described: dict) -> float:
    """Return the discount that a run was trained with, 0.95 if run.json has none."""
    return described.get("trainer", described.get("estimator", {})).get("gamma", 0.95)  # a log has no trainer


def verdict_on(iterations: list[analysis.Iteration], run: dict, replaced: Sequence[Trajectory] = ()) -> str | None:
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


def mean_over(rows: list[dict], part: str, name: str) -> float:
    """Return the mean over the iterations that have this number; nan if none has."""
    values = np.array([row[part][name] for row in rows])
    return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else float("nan")


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

    def mean(part: str, name: str) -> float:
        return mean_over(rows, part, name)

    unfinished = sum(row["unfinished"] for row in rows)
    lines = [
        *([f"{unfinished} lines were not written to their end and are left out"] if unfinished else []),
        _what(run, len(rows), sum(row["steps"] for row in rows)),
        f"visits of a node: {mean('group_size', 'mean'):.1f} (of a mean step's node: "
        f"{mean('group_size', 'mean_of_step'):.1f}); {100 * mean('group_size', 'singleton_steps'):.1f} % of steps "
        "in a node visited once",
        f"states visited again whose returns differ: {100 * mean('value_variation', 'varying_share'):.0f} %, by "
        f"{mean('value_variation', 'mean_deviation'):.2f} (standard deviation, mean over steps)",
        f"variance of V: {mean('value_errors', 'value_ratio'):.2f} times what independent visits would give; "
        f"{100 * mean('value_errors', 'revisit_share'):.0f} % of steps are second visits of their trajectory",
        f"variance of delta: {mean('value_errors', 'edge_ratio'):.2f} times what independent ends would give; "
        f"{100 * mean('value_errors', 'shared_share'):.0f} % of trajectories through an edge's smaller end are in "
        "both",
    ]
    # A run in which all returns are equal, or no state is visited twice, has no such numbers.
    return "\n".join(line for line in lines if "nan" not in line)


def _what(run: dict, iterations: int, steps: int) -> str:
    if "traces" not in run:
        return f"{iterations} iterations, {steps} steps"
    file, name = run["traces"]["file"], run.get("estimator", {}).get("estimator_name", "g2po")
    return f"logged runs of {file}, credited with {name} and not trained on: {steps} calls of episodes with a result"
