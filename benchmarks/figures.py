"""Figures of runs, among them the paper's: variance of state values, visits of nodes, turns, shares of time.

python -m benchmarks.figures RUN [--output FOLDER]
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from g2po_trl import StateGraph
from g2po_trl.runs.iterations import load_iteration, load_log

COLORS = 128  # of a PNG, which takes a third of the bytes of all colours
PHASES = ("environment", "generation", "advantage", "logps", "update")
CURVES = {
    "success": "episode/success_rate",
    "score": "episode/score",
    "turns": "episode/turns",
    "turns_to_success": "episode/turns_to_success",
    "valid": "episode/valid_action_ratio",
    "admissible": "episode/admissible_action_ratio",
    "group_size": "graph/mean_group_size",
    "singleton_steps": "graph/singleton_step_fraction",
    "value_std_within_node": "graph/value_std_within_node",
    "left_out_fraction": "update/left_out_fraction",
    **{f"time_{phase}": f"time/{phase}" for phase in (*PHASES, "rollout", "critic", "batch")},
    **{name: name for name in ("kl", "entropy", "grad_norm", "learning_rate")},
}
LARGEST, WIDTH, BINS = 20, 0.5, 12  # histograms: visits of a node, deviations of its returns


def figure(xlabel: str, ylabel: str, width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """Return a figure with one empty plot, and its axes."""
    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    finish(axes)
    return made, axes


def finish(axes: Axes) -> None:
    """Draw a grid behind the lines, and no frame above them."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(made: Figure, folder: str | Path, name: str) -> Path:
    """Write a figure as NAME.png of few colours."""
    path, drawn = Path(folder, f"{name}.png"), io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(drawn, format="png", dpi=150)
    Image.open(drawn).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def learning_curves(
    curves: Mapping[str, Sequence[Sequence[float]]], window: int = 5, ylabel: str = "success (%)", bold: str = "g2po"
) -> Figure:
    """Draw learning curves of several methods: the mean over seeds, with the range over seeds as a band.

    More than five methods: only `bold` has a band, and the legend stands beside the plot, in the order of the ends.

    Args:
        curves: method -> for each seed, success (a fraction) by iteration.
        window: number of iterations that each point averages.
        ylabel: title of the y axis.
        bold: method drawn with a thick line.
    """
    many = len(curves) > 5
    made, axes = figure("iteration", ylabel, width=9.0 if many else 7.5, height=4.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    ends = {}
    for method, seeds in curves.items():
        length = min(map(len, seeds))
        kernel = np.ones(min(window, length)) / min(window, length)
        smooth = np.array([np.convolve(curve[:length], kernel, mode="valid") for curve in seeds]) * 100
        iterations = np.arange(length - smooth.shape[1] + 1, length + 1)
        style = {"linewidth": 2.4, "color": "black"} if method == bold else {"linewidth": 1.3}
        (line,) = axes.plot(iterations, smooth.mean(0), label=method, **style)
        ends[line] = smooth.mean(0)[-1]
        if not many or method == bold:
            band = {"color": line.get_color(), "alpha": 0.08, "linewidth": 0}
            axes.fill_between(iterations, smooth.min(0), smooth.max(0), **band)
    if many:
        made.legend(handles=sorted(ends, key=ends.get, reverse=True), loc="outside right center", fontsize=8)
    else:
        axes.legend(fontsize=8)
    return made


def record_of(folder: Path) -> dict[str, Any]:
    """Return the curves of a run, its own evaluations, and histograms of its first and last graphs."""
    log = [entry for entry in load_log(folder) if entry.get("episode/success_rate") is not None]
    curves = {name: [rounded(entry.get(metric)) for entry in log] for name, metric in CURVES.items()}
    gamma = json.loads((folder / "run.json").read_text())["trainer"]["gamma"]
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    numbers, fifth = range(1, len(log) + 1), max(1, len(log) // 5)
    parts = {"first": numbers[:fifth], "last": numbers[-fifth:]}
    return {
        "iterations": len(log),
        "training": {name: of for name, of in curves.items() if any(value is not None for value in of)},
        "own_evaluations": [
            {key: entry[key] for key in ("step", "episodes", "success_rate")} for entry in evaluations
        ],
        "graphs": {
            name: histograms(StateGraph.from_groups(load_iteration(folder, number).groups, gamma) for number in part)
            for name, part in parts.items()
        },
    }


def histograms(graphs: Iterable[StateGraph]) -> dict[str, Any]:
    """Return histograms of visits of nodes, and of the deviations of the returns from a node.

    `steps[k]`: steps in nodes visited k + 1 times, in the last entry also more often. `deviations[k]`: nodes with
    unequal returns whose sample deviation is in [k, k + 1) x 0.5 units of reward, in the last entry also larger.
    `revisited`: nodes visited twice or more.
    """
    steps, deviations, revisited = np.zeros(LARGEST, int), np.zeros(BINS, int), 0
    for graph in graphs:
        visits, used = graph.node_visits, graph.counted
        steps += np.bincount(np.minimum(visits, LARGEST) - 1, visits, minlength=LARGEST).astype(int)
        squares = (graph.returns - graph.values)[used] ** 2
        squares = np.bincount(graph.node[used], squares, minlength=graph.num_nodes)
        deviation = np.sqrt(squares / np.maximum(visits - 1, 1))
        varying = (visits > 1) & (deviation > 1e-9 * max(1.0, np.abs(graph.rewards).max(initial=0)))
        deviations += np.bincount(np.minimum(deviation[varying] // WIDTH, BINS - 1).astype(int), minlength=BINS)
        revisited += int(np.sum(visits > 1))
    return {"steps": steps.tolist(), "deviations": deviations.tolist(), "revisited": revisited}


def rounded(value: Any) -> Any:
    """Return numbers, also in dictionaries, with five digits; None for nan."""
    if isinstance(value, dict):
        return {name: rounded(of) for name, of in value.items()}
    return None if value is None or np.isnan(value) else float(f"{value:.5g}")


def paper(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Figure:
    """Draw the paper's figures, a row for each setting. `runs`: setting -> method -> records; the first is bold."""
    made = Figure(figsize=(16, 3.4 * len(runs)), layout="constrained")
    rows = made.subplots(len(runs), 5, squeeze=False)
    for (setting, methods), row in zip(runs.items(), rows):
        reference = list(next(iter(methods.values())))
        for when in ("first", "last"):
            of = [record["graphs"][when] for record in reference]
            counts, revisited = np.sum([one["deviations"] for one in of], axis=0), sum(one["revisited"] for one in of)
            share = 100 * counts / max(revisited, 1)
            label = f"{when} fifth ({share.sum():.0f} % vary)"
            row[0].stairs(share, WIDTH * np.arange(len(counts) + 1), label=label)
            steps = np.sum([one["steps"] for one in of], axis=0)
            row[1].plot(np.arange(1, len(steps) + 1), 100 * steps / max(steps.sum(), 1), ".-", label=f"{when} fifth")
        row[0].set(xlabel="standard deviation of a state's returns", ylabel="share of revisited states (%)")
        row[1].set(xlabel=f"visits of a node ({LARGEST}: or more)", ylabel="share of steps (%)")
        titles = {"group_size": "visits of a node, mean", "turns_to_success": "turns of successful episodes"}
        for axes, (curve, title) in zip(row[2:], titles.items()):
            for number, (method, records) in enumerate(methods.items()):
                found = [record["training"][curve] for record in records if curve in record["training"]]
                if found:
                    values = np.array([of[: min(map(len, found))] for of in found], dtype=float)
                    style = {} if number else {"linewidth": 2.4, "color": "black"}
                    axes.plot(np.arange(1, values.shape[1] + 1), np.nanmean(values, axis=0), label=method, **style)
            axes.set(xlabel="iteration", ylabel=title)
        left = np.zeros(len(methods))
        totals = np.array([[seconds(of, phase) for phase in PHASES] for of in methods.values()])
        for phase, share in zip(PHASES, (100 * totals / np.maximum(totals.sum(1, keepdims=True), 1e-9)).T):
            row[4].barh(list(methods), share, left=left, label=f"{phase} ({share[0]:.2g} %)")
            left += share
        row[4].set(xlabel="share of an iteration's time (%)")
        row[4].invert_yaxis()
        for axes in row:
            finish(axes)
            beside = {"ncols": 2, "loc": "upper center", "bbox_to_anchor": (0.5, -0.2)} if axes is row[4] else {}
            if axes.get_legend_handles_labels()[0]:  # no episode of a short run may have succeeded
                axes.legend(fontsize=8, **beside)
        row[0].set_title(setting, loc="left", fontweight="bold")
    return made


def seconds(records: Iterable[Mapping[str, Any]], phase: str) -> float:
    """Return the seconds of a phase, summed over all iterations of some runs."""
    return sum(value or 0.0 for record in records for value in record["training"].get(f"time_{phase}", ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="default: RUN/figures")
    args = parser.parse_args()
    record, output = record_of(args.run), args.output or args.run / "figures"
    curves = learning_curves({args.run.name: [record["training"]["success"]]}, bold=args.run.name)
    for name, made in (("learning_curve", curves), ("paper", paper({args.run.name: {args.run.name: [record]}}))):
        print(save(made, output, name))


if __name__ == "__main__":
    main()
