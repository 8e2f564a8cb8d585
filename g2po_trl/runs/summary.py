"""Comparison of evaluations: the first and the last of a panel, and a table of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, nan
from typing import Any

from .metrics import METRICS

_COMPARED = ("name", "panel", "temperature")
REPORT = "report"  # name of evaluations of a panel that chose nothing


def at_temperature(panel: str, temperature: float) -> str:
    """Return the name of a set's evaluations at one of `other_eval_temperatures`."""
    return f"{panel}_t{temperature:g}".replace(".", "_")


def before_and_after(evaluations: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the last evaluation of the panel "report", or else of the last evaluation's panel."""
    by_panel = before_and_after_by_panel(evaluations)
    return by_panel[REPORT if REPORT in by_panel else evaluations[-1]["name"]]


def before_and_after_by_panel(evaluations: Sequence[dict]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the first and the last evaluation of each panel, by the panel's name; of "report" alone if there is one.

    The first is the first one of the same tasks at the same temperature as the last.
    """
    found = {}
    for last in evaluations:  # a later one of the panel replaces it
        alike = (one for one in evaluations if all(one.get(key) == last.get(key) for key in _COMPARED))
        found[last["name"]] = next(alike), last
    return {name: pair for name, pair in found.items() if REPORT not in found or is_reported(name)}


def is_reported(panel: str) -> bool:
    """Return whether evaluations of this name are of the reported panel, at any temperature."""
    return panel == REPORT or panel.startswith(f"{REPORT}_t")


def format_table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return summaries side by side, e.g. `{"before": …, "after": …}`, as a text table with their difference."""
    summaries = list(columns.values())
    kinds = sorted({kind for summary in summaries for kind in summary["success_rate_by_type"]})
    rows = [(f"success: {kind}", [one["success_rate_by_type"].get(kind) for one in summaries], 100) for kind in kinds]
    for metric in METRICS:
        if metric.title and all(metric.name in one for one in summaries):
            rows.append((metric.title, [one[metric.name] for one in summaries], metric.scale))
        if metric.name == "success_rate" and all(one.get("success_rate_error") is not None for one in summaries):
            rows.append(("  ± standard error", [one["success_rate_error"] for one in summaries], 100))
    if all("episodes" in one for one in summaries):
        rows.append(("episodes", [one["episodes"] for one in summaries], 0))
    width, is_pair = max(len(label) for label, *_ in rows), len(columns) == 2
    header = " " * width + "".join(f"{name:>10}" for name in [*columns, *["change"] * is_pair])
    lines = [header, "-" * len(header)]
    for label, values, scale in rows:
        values = [nan if value is None else value for value in values]  # a file has null for nan
        cells = [f"{value * scale:10.1f}" if scale else f"{value:10.0f}" for value in values]
        if is_pair and scale:
            is_error = label.startswith("  ±")
            change = hypot(*values) if is_error else values[1] - values[0]
            cells.append(f"{change * scale:{'' if is_error else '+'}10.1f}")
        lines.append(f"{label:<{width}}" + "".join(cells))
    return "\n".join(lines)
