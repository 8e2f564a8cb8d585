"""The table of windows and conversations, from the files of their starts, runs and updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning.history_teaching import HISTORIES

LAST = 3  # iterations over which success at the end of training is averaged

Run = dict[str, Any]


def report(results: Path) -> str:
    """Return the table of what is there, and write it."""
    runs = {history: read(results, f"{history}-seed*.json") for history in HISTORIES}
    costs, starts = read(results, "cost-*.json"), read(results, "start-*.json")
    rows: list[tuple[str, dict[str, str]]] = []

    def row(name: str, of: Callable[[str], str]) -> None:
        rows.append((name, {history: of(history) for history in HISTORIES}))

    for key in ("actions", "tokens"):
        row(f"{key} taught after the bundled model's own course", lambda h, key=key: taught(starts, h, key))
    row("iterations", lambda h: shown([len(run["curves"]["rollout/steps"]) for run in runs[h]], "{:.0f}"))
    for temperature in (1.0, 0.4):
        for name, trained in (("start", False), ("after training", True)):
            row(
                f"held-out success at {temperature}, {name}, %",
                lambda h, t=temperature, after=trained: shown([panel(run, t, after) for run in runs[h]]),
            )
    for name, part in (("first", slice(0, LAST)), ("last", slice(-LAST, None))):
        row(
            f"success in training, {name} {LAST} iterations, %",
            lambda h, part=part: shown([100 * mean(run["curves"]["episode/success_rate"][part]) for run in runs[h]]),
        )
    row("turns of an episode", lambda h: of_curve(runs[h], "episode/turns", "{:.1f}"))
    row(
        "prompt tokens of a step",
        lambda h: shown([per_step(run, "rollout/prompt_tokens") for run in runs[h]], "{:.0f}"),
    )
    row("prompt tokens of a rollout", lambda h: of_curve(runs[h], "rollout/prompt_tokens", "{:,.0f}"))
    row(
        "of these in vLLM's prefix cache, %",
        lambda h: of_curve(runs[h], "rollout/prefix_cache_hit_fraction", "{:.1f}", 100),
    )
    row(
        "prompts that continue an earlier one, %",
        lambda h: of_curve(runs[h], "rollout/continued_prompt_fraction", "{:.1f}", 100),
    )
    row("positions of an update", lambda h: of_curve(runs[h], "update/forwarded_tokens", "{:,.0f}"))
    row(
        "tokens of samples that are shared, %",
        lambda h: of_curve(runs[h], "update/repeated_token_fraction", "{:.1f}", 100),
    )
    for found in costs:
        of = f"of rollout {found['rollout']}"
        for kind in ("one mini-batch", "mini-batches of 256"):
            row(f"positions {of}, {kind}", lambda h, f=found, k=kind: f"{f['counts'][f'{h}, {k}']['positions']:,}")
        for what in ("update", "log-probabilities"):
            name = f"{what}, {{}}, mini-batches of 256"
            row(f"CPU seconds {of}, {what}", lambda h, f=found, name=name: f"{f['medians'][name.format(h)]:.2f}")
    seeds = " / ".join(str(run["seed"]) for run in runs[HISTORIES[0]])
    head = f"| by seed ({seeds}) | {' | '.join(HISTORIES)} |\n|{'---|' * (len(HISTORIES) + 1)}\n"
    table = head + "".join(f"| {name} | {' | '.join(cells.values())} |\n" for name, cells in rows)
    (results / "table.md").write_text(table)
    return table


def taught(starts: Sequence[Run], history: str, key: str) -> str:
    """Return what a start was taught."""
    found = [sum(course[key] for course in start["courses"]) for start in starts if start["history"] == history]
    return f"{found[0]:,}" if found else "–"


def read(results: Path, pattern: str) -> list[Run]:
    """Return the files that match, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(results.glob(pattern))]


def panel(run: Run, temperature: float, trained: bool) -> float | None:
    """Return success in percent of a run's panel before or after training, at a temperature. `None`: not played."""
    at = [one for one in run["panels"] if one["temperature"] == temperature and bool(one["step"]) == trained]
    return 100 * at[-1]["success_rate"] if at else None


def per_step(run: Run, metric: str) -> float:
    """Return the mean of a metric per step of a rollout."""
    return sum(run["curves"][metric]) / sum(run["curves"]["rollout/steps"])


def of_curve(runs: Sequence[Run], metric: str, form: str, times: float = 1) -> str:
    """Return the mean of a curve of each run."""
    curves = [run["curves"].get(metric) for run in runs]
    return shown([None if curve is None else times * mean(curve) for curve in curves], form)


def shown(values: Sequence[float | None], form: str = "{:.1f}") -> str:
    """Return the values of the seeds."""
    return " / ".join("–" if value is None else form.format(value) for value in values) or "–"
