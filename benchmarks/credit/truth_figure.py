"""Draw what `truth.py` measured: how near each estimator's gradient comes to the exact one, and where that changes.

    python -m benchmarks.credit.truth_figure [--results benchmarks/results/truth]

Reads RESULTS/results.json.gz and writes RESULTS/cosines.png. Left: all estimators at the default setting.
Right: four of them as one thing of the setting varies. Bars and bands are 95 % intervals over houses. They hold what
differs from house to house for all estimators alike: for a difference, see the paired intervals of RESULTS/table.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import RESULTS, read_text
from benchmarks.figures import save

INK, MUTED, GRID = "#222222", "#8a8a8a", "#e4e4e4"
ABLATIONS, NOT_AVAILABLE = "#7fa3cf", "#b9b9b9"
COLORS = {"g2po, λ 0.5": "#00876c", "g2po": "#1f4e9c", "gigpo": "#d9822b", "grpo (A_EP)": "#8a8a8a"}
# From top to bottom: name in the results, label, colour.
ROWS = (
    ("true advantage", "true advantage", NOT_AVAILABLE),
    ("g2po, λ 0.5", "G2PO, λ = 0.5", COLORS["g2po, λ 0.5"]),
    ("g2po", "G2PO", COLORS["g2po"]),
    ("g2po without A_NC", "without $A_{NC}$", ABLATIONS),
    ("A_EP + A_NC, aggregated", "without $A_{EC}$", ABLATIONS),
    ("g2po without aggregation", "without aggregation", ABLATIONS),
    ("g2po, gamma 1", "with γ = 1", ABLATIONS),
    ("crbc", "CRBC", INK),
    ("hgpo", "HGPO", INK),
    ("graphgpo", "GraphGPO", INK),
    ("gigpo", "GiGPO", COLORS["gigpo"]),
    ("perfect critic", "perfect critic", NOT_AVAILABLE),
    ("grpo discounted", "GRPO, reward × γᵀ", INK),
    ("grpo (A_EP)", "GRPO", COLORS["grpo (A_EP)"]),
)
PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "success rate of the policy, %",
        {"success 3 %": "3", "success 10 %": "10", "default": "40", "success 70 %": "70", "success 90 %": "90"},
    ),
    ("episodes in a group", {"groups of 4": "4", "default": "8", "groups of 16": "16"}),
    ("turns", {"15 turns": "15", "default": "30", "60 turns": "60"}),
    (
        "state key",
        {
            "default": "complete",
            "key without other objects": "other\nobjects\nhidden",
            "key without processing": "processing\nhidden",
            "key of the place alone": "place\nalone",
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "truth")
    args = parser.parse_args()
    results = json.loads(read_text(args.results / "results.json"))["results"]
    print(save(drawn(results), args.results, "cosines"))


def drawn(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The figure, from `results` of results.json.gz: [setting][estimator][measure]."""
    figure = Figure(figsize=(9.4, 5.0), layout="constrained", facecolor="white")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25), wspace=0.03)
    draw_estimators(left.subplots(), results["default"])
    panels = right.subplots(2, 2, sharey=True)
    for axes, (title, settings) in zip(panels.flat, PANELS, strict=True):
        draw_setting(axes, results, title, settings)
    for axes in panels[:, 0]:
        axes.set_ylabel("cosine", fontsize=10.5)
    name_lines(panels[1, 0], results, "60 turns")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure


def draw_estimators(axes: Axes, results: Mapping[str, Any]) -> None:
    """One row an estimator: mean cosine and interval."""
    for height, (name, _, color) in enumerate(reversed(ROWS)):
        mean, half = results[name]["cosine"]["mean"], results[name]["cosine"]["half_width"]
        axes.plot([mean - half, mean + half], [height, height], color=color, linewidth=2.2, solid_capstyle="butt")
        axes.plot(mean, height, "o", color=color, markersize=6)
        axes.annotate(f"{mean:.2f}", (mean, height), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    axes.set_yticks(range(len(ROWS)), [label for _, label, _ in reversed(ROWS)], fontsize=10.5)
    axes.set_xlim(0.68, 1.0)
    axes.set_xlabel("cosine with the exact gradient", fontsize=10.5)
    finish(axes, "x", "40 % success, groups of 8, 30 turns")
    for tick, (name, _, color) in zip(axes.get_yticklabels(), reversed(ROWS), strict=True):
        tick.set_color(color if name in COLORS else INK)
        tick.set_fontweight("bold" if name in COLORS else "normal")


def draw_setting(axes: Axes, results: Mapping[str, Any], title: str, settings: Mapping[str, str]) -> None:
    """One line an estimator, over settings that differ in one thing."""
    places = range(len(settings))
    for name, color in COLORS.items():
        means, halves = values(results, name, list(settings))
        axes.fill_between(
            places,
            [mean - half for mean, half in zip(means, halves)],
            [mean + half for mean, half in zip(means, halves)],
            color=color,
            alpha=0.13,
            linewidth=0,
        )
        axes.plot(places, means, "o-", color=color, linewidth=1.8, markersize=4)
    axes.set_xticks(places, list(settings.values()), fontsize=9.5 if all(map(str.isdigit, settings.values())) else 8)
    axes.set_ylim(0.35, 1.0)
    axes.margins(x=0.08)
    finish(axes, "y", title)


def name_lines(axes: Axes, results: Mapping[str, Any], setting: str) -> None:
    """Names beside the ends of the lines of a panel whose last setting keeps them apart."""
    end = axes.get_xlim()[1]
    axes.set_xlim(right=end + 1.9)
    for number, (name, color) in enumerate(COLORS.items()):
        label = next(label for row, label, _ in ROWS if row == name)
        at = (end, results[setting][name]["cosine"]["mean"])
        style = {"color": color, "fontsize": 9.5, "fontweight": "bold", "va": "center"}
        axes.annotate(label, at, (0, 3 if number == 0 else -2), textcoords="offset points", **style)


def values(results: Mapping[str, Any], name: str, settings: Sequence[str]) -> tuple[list[float], list[float]]:
    """Means and half widths of the cosine, one a setting."""
    of = [results[setting][name]["cosine"] for setting in settings]
    return [one["mean"] for one in of], [one["half_width"] for one in of]


def finish(axes: Axes, grid: str, title: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left", color=INK)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
