"""Plots for papers and notebooks: each function takes numbers and returns a figure; `save` writes PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

PHASES = ("environment", "generation", "logps", "advantage", "update")


class Plot(Figure):
    """A figure that a notebook shows. Made without pyplot: no window, no global state, nothing to close."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def figure(xlabel: str, ylabel: str, width: float = 6.4, height: float = 4.0) -> tuple[Plot, object]:
    """Return a figure with one empty plot, and its axes."""
    made = Plot(figsize=(width, height), layout="constrained")
    axes = made.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


def save(made: Figure, folder: str | Path, name: str, svg: bool = True) -> list[Path]:
    """Write a figure as NAME.png and, if `svg`, as NAME.svg; return the files. Equal figures give equal bytes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    written = [Path(folder, f"{name}.png")]
    made.savefig(written[0], dpi=150)
    if svg:
        written.append(Path(folder, f"{name}.svg"))
        with rc_context({"svg.hashsalt": name}):
            made.savefig(written[1], metadata={"Date": None})
    return written


def learning_curves(
    curves: Mapping[str, Sequence[Sequence[float]]], window: int = 5, ylabel: str = "success (%)", bold: str = "g2po"
) -> Figure:
    """Learning curves of several methods: the mean over seeds, with the range over seeds as a band.

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


def success_of_run(
    success: Sequence[float], evaluations: Sequence[tuple[float, float]] = (), window: int = 5
) -> Figure:
    """Success by iteration, the mean of the last `window`, and evaluations: pairs of iteration and success."""
    made, axes = figure("iteration", "success (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    values, iterations = 100 * np.asarray(success), np.arange(1, len(success) + 1)
    means = [values[max(0, n - window) : n].mean() for n in iterations]
    axes.plot(iterations, values, linewidth=0.8, color="gray", label="an iteration")
    axes.plot(iterations, means, linewidth=2.4, color="black", label=f"mean of {window}")
    if evaluations:
        axes.plot(*zip(*((n, 100 * value) for n, value in evaluations)), "o", color="C1", label="evaluation")
    axes.set_ylim(-2, 102)
    axes.legend(fontsize=8)
    return made


def group_size_dynamics(iterations: Sequence[int], means: Sequence[float], singleton_steps: Sequence[float]) -> Figure:
    """Mean group size and share of steps without a second visit, over iterations."""
    made, axes = figure("iteration", "visits of a node, mean")
    axes.plot(iterations, means, color="C0")
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.plot(iterations, 100 * np.asarray(singleton_steps), color="C1")
    other.set_ylabel("steps in a node visited once (%)", color="C1")
    other.set_ylim(bottom=0)
    axes.yaxis.label.set_color("C0")
    return made


def group_size_distribution(sizes: Sequence[int], largest: int = 20) -> Figure:
    """Share of steps by the visits of their node; larger ones than `largest` in the last bar."""
    made, axes = figure("visits of a node", "share of steps (%)")
    sizes = np.asarray(sizes)
    shares = np.bincount(np.minimum(sizes, largest), sizes, minlength=largest + 1)[1:]
    axes.bar(np.arange(1, largest + 1), 100 * shares / max(shares.sum(), 1))
    axes.set_xticks([1, *range(5, largest, 5), largest], [*map(str, [1, *range(5, largest, 5)]), f"{largest}+"])
    return made


def value_variation(deviations: Sequence[float], varying_share: float) -> Figure:
    """How far returns from one state lie apart, over the states where they do."""
    made, axes = figure("standard deviation of the returns of a state", "states")
    axes.hist(deviations, bins=30)
    axes.set_title(f"{100 * varying_share:.0f} % of the states visited again have returns that differ", fontsize=10)
    return made


def turns_to_finish(iterations: Sequence[int], turns: Sequence[Sequence[int]]) -> Figure:
    """Median and quartiles of the turns of won episodes, over iterations."""
    made, axes = figure("iteration", "turns of won episodes")
    rows = [(i, *np.percentile(t, [25, 50, 75])) for i, t in zip(iterations, turns) if len(t)]
    if rows:
        at, low, middle, high = np.array(rows).T
        axes.plot(at, middle, label="median")
        axes.fill_between(at, low, high, alpha=0.2, linewidth=0, label="quartiles")
        axes.legend(fontsize=8)
    return made


def sweep(name: str, rows: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]]]) -> Figure:
    """Success over the values of an option.

    Args:
        name: of the option; title of the x axis.
        rows: method -> values, mean success (a fraction) at each, and its interval (low, high).
    """
    made, axes = figure(name, "mean success (%)")
    for method, (values, means, intervals) in rows.items():
        means, intervals = 100 * np.asarray(means), 100 * np.asarray(intervals)
        distance = [means - intervals[:, 0], intervals[:, 1] - means]
        axes.errorbar(values, means, yerr=distance, marker="o", capsize=3, label=method)
    axes.legend(fontsize=8)
    return made


def variances(sizes: Sequence[int], simulated: Mapping[str, np.ndarray]) -> Figure:
    """Variances of V and delta over group sizes, measured (dots) and as the paper has them (lines)."""
    made, axes = figure("visits of a node, |G|", "variance (units of $\\sigma^2$)")
    axes.plot(sizes, simulated["value_expected"], "C0", label="$\\sigma^2/|G|$")
    axes.plot(sizes, simulated["value"], "C0o", label="V, drawn")
    axes.plot(sizes, simulated["edge_expected"], "C1", label="$2\\sigma^2/|G|$")
    axes.plot(sizes, simulated["edge"], "C1o", label="$\\delta$, drawn")
    axes.plot(sizes, simulated["edge_bound"], "C2--", label="$4\\sigma^2/|G|$, bound")
    axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=8)
    return made


def phase_times(iterations: Sequence[int], times: Sequence[Mapping[str, float]]) -> Figure:
    """Seconds of each iteration by phase, stacked. `times`: phase -> seconds, one an iteration."""
    made, axes = figure("iteration", "seconds")
    under = np.zeros(len(times))
    for phase in PHASES:
        seconds = np.array([row.get(phase, 0.0) for row in times])
        axes.bar(iterations, seconds, bottom=under, width=0.85, label=phase)
        under += seconds
    axes.legend(fontsize=8, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return made
