"""The figures of `comparison.py`: learning curves, differences with their intervals, and the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.learning.comparison_stages import ARMS, REFERENCE, START
from benchmarks.paper import plots

Arms = Mapping[str, Mapping[int, Mapping[str, Any]]]  # arm -> seed -> run
PHASES = ("environment", "generation", "advantage", "logps", "update")
SHOWN = (REFERENCE, "gigpo", "grpo")  # in the paper's figures
WIDTH = 0.5  # of a bin of deviations, in units of reward


def draw(stages: Mapping[str, Arms], numbers: Mapping[str, Any], folder: Path) -> None:
    """Write a figure for each stage that has runs."""
    for stage, arms in stages.items():
        curves = {
            arm: [run["training"]["success"] for run in seeds.values()]
            for arm, seeds in arms.items()
            if arm != START and all("training" in run for run in seeds.values())
        }
        if curves:
            label = "success of training episodes, mean of 5 iterations (%)"
            plots.save(plots.learning_curves(curves, ylabel=label, bold=REFERENCE), folder, f"curves-{stage}")
    if swept := numbers.get("weights"):
        plots.save(sweep(swept), folder, "sweep-w")
    if "tests" in numbers:
        plots.save(differences(numbers["tests"]), folder, "differences")
    settings = {
        name: stages[stage]
        for name, stage in (("ALFWorld", "main"), ("WebShop", "webshop"))
        if stages[stage].get(REFERENCE)
    }
    if settings:
        plots.save(paper(settings), folder, "paper")


def sweep(arms: Mapping[str, Mapping[str, Any]]) -> plots.Figure:
    """Success over w, with the range over seeds. `arms`: "w 0.5" -> the numbers of its seeds."""
    ws = sorted(float(arm.split()[1]) for arm in arms)
    rows = {}
    for name in ("first half", "training", "held-out 1.0", "held-out 0.4"):
        of = [np.array(arms[f"w {w:g}"][name], dtype=float) for w in ws]
        rows[name] = (ws, [v.mean() for v in of], [(v.min(), v.max()) for v in of])
    return plots.sweep("w, weight of the step advantages", rows)


def differences(tests: Mapping[str, Any]) -> plots.Figure:
    """Each arm's difference to the reference with its simultaneous interval, for each test of all runs."""
    made, axes = plots.figure(f"points of success, minus {REFERENCE}", "", width=7.5)
    axes.axvline(0, color="black", linewidth=0.8)
    arms = [arm for arm in ARMS if arm != REFERENCE]
    shown = {name: test for name, test in tests.items() if name.endswith("all runs")}
    for number, (name, test) in enumerate(shown.items()):
        of = [test["differences"][arm] for arm in arms]
        means, ends = 100 * np.array([d["mean"] for d in of]), 100 * np.array([d["interval"] for d in of])
        at = np.arange(len(arms)) + 0.2 * (number - (len(shown) - 1) / 2)
        distance = [means - ends[:, 0], ends[:, 1] - means]
        axes.errorbar(means, at, xerr=distance, fmt="o", capsize=3, label=name.removesuffix(", all runs"))
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return made


def paper(settings: Mapping[str, Arms]) -> plots.Figure:
    """The paper's figures, a row for each setting: variance of state values, group sizes, turns, share of time."""
    made = plots.Plot(figsize=(16, 3.4 * len(settings)), layout="constrained")
    rows = made.subplots(len(settings), 5, squeeze=False)
    for (name, arms), row in zip(settings.items(), rows):
        for axes in row:
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        own = list(arms[REFERENCE].values())
        deviations(row[0], own)
        sizes(row[1], own)
        over_iterations(row[2], arms, "group_size", "visits of a node, mean")
        over_iterations(row[3], arms, "turns_to_success", "turns of successful episodes")
        time_shares(row[4], arms)
        row[0].set_title(name, loc="left", fontweight="bold")
    return made


def deviations(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """How much the returns of a state differ: share of the states that are visited again."""
    for when in ("first", "last"):
        counts = np.sum([run["graphs"][when]["deviations"] for run in runs], axis=0)
        revisited = sum(run["graphs"][when]["revisited"] for run in runs)
        varying = counts.sum() / max(revisited, 1)
        edges = WIDTH * np.arange(len(counts) + 1)
        axes.stairs(100 * counts / max(revisited, 1), edges, label=f"{when} fifth ({100 * varying:.0f} % vary)")
    axes.set(xlabel="standard deviation of a state's returns", ylabel="share of revisited states (%)")
    axes.legend(fontsize=8)


def sizes(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Share of steps by the visits of their node."""
    for when in ("first", "last"):
        steps = np.sum([run["graphs"][when]["steps"] for run in runs], axis=0)
        visits = np.arange(1, len(steps) + 1)
        axes.plot(visits, 100 * steps / max(steps.sum(), 1), marker=".", label=f"{when} fifth of the iterations")
    axes.set(xlabel=f"visits of a node ({len(steps)}: or more)", ylabel="share of steps (%)")
    axes.set_ylim(0, 1.3 * axes.dataLim.ymax)  # room for the legend
    axes.legend(fontsize=8)


def over_iterations(axes: Axes, arms: Arms, curve: str, label: str) -> None:
    """Mean over seeds of a curve, for some methods."""
    for arm in SHOWN:
        curves = [run["training"][curve] for run in arms.get(arm, {}).values() if curve in run["training"]]
        if curves:
            length = min(map(len, curves))
            values = np.array([curve[:length] for curve in curves], dtype=float)
            style = {"linewidth": 2.4, "color": "black"} if arm == REFERENCE else {"linewidth": 1.3}
            axes.plot(range(1, length + 1), np.nanmean(values, axis=0), label=arm, **style)
    axes.set(xlabel="iteration", ylabel=label)
    axes.legend(fontsize=8)


def time_shares(axes: Axes, arms: Arms) -> None:
    """Share of an iteration's time by phase, one bar a method."""
    shown = [arm for arm in SHOWN if arms.get(arm)]
    seconds = {arm: [phase_seconds(arms[arm].values(), phase) for phase in PHASES] for arm in shown}
    left = np.zeros(len(shown))
    for number, phase in enumerate(PHASES):
        shares = np.array([100 * seconds[arm][number] / max(sum(seconds[arm]), 1e-9) for arm in shown])
        of = f" ({shares[0]:.2g} %)" if len(shares) else ""
        axes.barh(shown, shares, left=left, label=phase + of)
        left += shares
    axes.set(xlabel="share of an iteration's time (%)")
    axes.invert_yaxis()
    axes.legend(
        fontsize=7,
        ncols=2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        title=f"{REFERENCE}'s shares",
        title_fontsize=7,
    )


def phase_seconds(runs: Any, phase: str) -> float:
    """Seconds of a phase, summed over all iterations of some runs."""
    return sum(value or 0.0 for run in runs for value in run["training"].get(f"time_{phase}", ()))
