"""Table and figure of `language.py`, drawn from its results.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.credit.truth import MEASURES

SHOWN = (
    "grpo (A_EP)",
    "gigpo",
    "A_EP + A_NC, aggregated",
    "g2po without aggregation",
    "g2po without A_NC",
    "g2po, λ 0.5",
    "g2po, whole state as key",
    "perfect critic",
)


def report(folder: Path) -> str:
    """Write `table.md` and `curves.png` from the folder's `results.json`; return the table."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    text = "\n".join([*_success(found), *_checks(found), *_credit(found)]) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    _draw(found, folder / "curves.png")
    return text


def curve(found: Mapping[str, Any], name: str, houses: str, temperature: str) -> tuple[list[int], np.ndarray]:
    """Return iterations, and the exact success (iterations, houses) in percent; `houses`: "training", "held_out"."""
    by_step = found["runs"][name]["success"]
    rows = [[100 * of[temperature][str(house)] for house in found[houses]] for of in by_step.values()]
    return [int(step) for step in by_step], np.array(rows)


def _success(found: Mapping[str, Any]) -> list[str]:
    names = {"training": "trained", "held_out": "held-out"}
    lines = []
    for name in found["runs"]:
        columns = [(houses, of) for houses in names for of in next(iter(found["runs"][name]["success"].values()))]
        curves = [curve(found, name, *column) for column in columns]
        lines += [f"### Exact success, trained on {name}, %: mean over the measured houses", ""]
        lines.append("| iteration | " + " | ".join(f"{names[houses]}, T = {of}" for houses, of in columns) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for row, step in enumerate(curves[0][0]):
            lines.append(f"| {step} | " + " | ".join(f"{values[row].mean():.2f}" for _, values in curves) + " |")
        lines.append("")
    return lines


def _checks(found: Mapping[str, Any]) -> list[str]:
    lines = ["### Exact success and the real rollout's, training houses", ""]
    lines.append(
        "| run | iteration | T | exact, % | played, % | episodes | z | admissible steps, % | spelled otherwise, % |"
    )
    lines.append("|---" * 9 + "|")
    for name, run in found["runs"].items():
        for step, rows in run["check"].items():
            for row in rows:
                rates = f"{100 * row['exact']:.2f} | {100 * row['played']:.2f} | {row['episodes']} | {row['z']:+.2f}"
                shares = f"{100 * row['admissible']:.1f} | {100 * row['other_spelling']:.3f}"
                lines.append(f"| {name} | {step} | {row['temperature']} | {rates} | {shares} |")
    return [*lines, ""]


def _credit(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, run in found["runs"].items():
        for step, by_estimator in run["credit"].items():
            lines += [f"### Credit after {step} iterations on {name}, mean over houses ± 95 %", ""]
            lines.append("| estimator | " + " | ".join(MEASURES) + " | cosine minus G2PO's |")
            lines.append("|---" * (len(MEASURES) + 2) + "|")
            for estimator, of in by_estimator.items():
                cells = [_number(of[measure]) for measure in MEASURES] + [_number(of["cosine"]["minus_g2po"], "+")]
                lines.append(f"| {estimator} | {' | '.join(cells)} |")
            lines.append("")
    return lines


def _number(of: Mapping[str, float], sign: str = "") -> str:
    mean, half = (float("nan") if of[name] is None else of[name] for name in ("mean", "half_width"))
    return f"{mean:{sign}.3f} ± {half:.3f}"


def _draw(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = found["runs"]
    figure, axes = pyplot.subplots(1, 2 + len(runs), figsize=(4.7 * (2 + len(runs)), 4), layout="constrained")
    for axis, temperature in zip(axes, ("1.0", "0.4")):
        for color, name in enumerate(runs):
            for houses, style, label in (("training", "-", "trained"), ("held_out", "--", "held-out")):
                steps, values = curve(found, name, houses, temperature)
                axis.plot(steps, values.mean(axis=1), style, color=f"C{color}", label=f"{name}: {label}")
            if temperature == "1.0":
                played = 100 * np.array(runs[name]["rollouts"])
                axis.plot(range(len(played)), played, ".", color=f"C{color}", alpha=0.3, label=f"{name}: rollouts")
        axis.set(title=f"Exact success at temperature {temperature}", xlabel="iteration", ylabel="%", ylim=(0, 100))
        axis.legend(fontsize=8)
    for axis, (name, run) in zip(axes[2:], runs.items()):
        for number, (step, by_estimator) in enumerate(run["credit"].items()):
            differences = [by_estimator[estimator]["cosine"]["minus_g2po"] for estimator in SHOWN]
            means, halves = ([of[name] for of in differences] for name in ("mean", "half_width"))
            places = np.arange(len(SHOWN)) + 0.15 * (number - 1.5)
            axis.errorbar(means, places, xerr=halves, fmt="o", markersize=4, label=f"after {step} iterations")
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_yticks(range(len(SHOWN)), SHOWN, fontsize=8)
        axis.set(title=f"Cosine minus G2PO's, {name}")
        axis.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
