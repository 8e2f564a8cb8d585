"""The table and the figures of `pretrained.py`: what runs changed, game by game and task by task."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.paper import plots

FEWEST = 3  # values of which a standard error is estimated


def runs_of(results: Path) -> list[dict]:
    """The complete runs."""
    return [json.loads(path.read_text()) for path in sorted(results.glob("*-seed*.json"))]


def report(results: Path) -> str:
    """Write table.md, curves and held-out of what is there."""
    runs = runs_of(results)
    if not runs:
        return "No run yet."
    lines = [
        "Held-out success in percent ± its standard error (96 games, one episode each); what training changed, game "
        "by game with the same random numbers; and success of training.",
        "",
        "| method | seed | before | midway | after | after − before | training, first five | last five | hours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        shown, success = panels(run), run["training"]["success_rate"]
        cells = [_with_error(one["success_rate"], one["episodes"]) for one in shown]
        cells.append(_change(_gained(run)))
        hours = sum(attempt["seconds"] for attempt in run["attempts"]) / 3600
        parts = [f"{100 * fmean(part):.1f}" for part in (success[:5], success[-5:])]
        lines.append(f"| {' | '.join([run['method'], str(run['seed']), *cells, *parts, f'{hours:.1f}'])} |")
    by_method: dict[str, dict[int, dict]] = {}
    for run in runs:
        by_method.setdefault(run["method"], {})[run["seed"]] = run
    lines += ["", *_means(by_method), *_against("g2po", by_method), *_official(results)]
    plots.save(_training(by_method), results, "curves")
    plots.save(_held_out(by_method), results, "held_out")
    text = "\n".join(lines) + "\n"
    (results / "table.md").write_text(text)
    return text


def panels(run: dict) -> tuple[dict, dict, dict]:
    """Before, midway and after."""
    panel = {one["step"]: one for one in run["panel"]}  # some runs have played the last one twice
    steps = sorted(panel)
    middle = min(steps, key=lambda step: abs(step - steps[-1] / 2))
    return panel[steps[0]], panel[middle], panel[steps[-1]]


def _gained(run: dict) -> list[int]:
    """By game: 1 won since, -1 lost since."""
    before, _, after = panels(run)
    return [int(b) - int(a) for a, b in zip(before["won"], after["won"], strict=True)]


def _means(by_method: dict[str, dict[int, dict]]) -> list[str]:
    """What each method changed, over its seeds, and all of them together."""
    lines = []
    for method, seeds in by_method.items():
        lines.append(f"- {method}, {_seeds(seeds)}: {_change(_by_game(seeds.values()))} points on held-out games.")
    runs = [run for seeds in by_method.values() for run in seeds.values()]
    return [*lines, f"- All runs: {_change(_by_game(runs))} points on held-out games."]


def _by_game(runs: Iterable[dict]) -> list[float]:
    return [fmean(game) for game in zip(*map(_gained, runs), strict=True)]


def _against(method: str, by_method: dict[str, dict[int, dict]]) -> list[str]:
    """The method beside each other one, for the seeds that both have: same games, same tasks."""
    own, lines = by_method.get(method, {}), []
    for other, seeds in by_method.items():
        common = sorted(set(own) & set(seeds))
        if other == method or not common:
            continue
        after, training = [], []
        for seed in common:
            a, b = (panels(runs[seed])[-1]["won"] for runs in (own, seeds))
            after.append([int(x) - int(y) for x, y in zip(a, b, strict=True)])
            a, b = (runs[seed]["training"]["success_rate"] for runs in (own, seeds))
            training += [x - y for x, y in zip(a, b, strict=True)]
        by_game = [fmean(game) for game in zip(*after, strict=True)]
        lines.append(
            f"- {method} − {other}, {_seeds(common)}: {_change(by_game)} points on held-out games after training, "
            f"{_change(training)} in training, on the same tasks."
        )
    return lines


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {next(iter(seeds))}" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _change(values: Sequence[float]) -> str:
    """Their mean and its standard error, in percent; equal values, or a few, have none."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) >= FEWEST else 0.0
    return f"{100 * fmean(values):+.1f}" + (f" ± {100 * error:.1f}" if error > 0 else "")


def _official(results: Path) -> list[str]:
    """The start's line, the best run's, and what training changed, game by game; errors are over games."""
    lines, shares = [], []
    for path in sorted(results.glob("official-*.json"), reverse=True):
        played = json.loads(path.read_text())
        shares.append([fmean(map(int, game)) for game in zip(*played["won"], strict=True)])
        turns, valid = (fmean(seed[name] for seed in played["seeds"]) for name in ("turns", "valid"))
        lines.append(
            f"- {played['games']} official games, {len(played['seeds'])} episodes each, {played['model']}: "
            f"{_change(shares[-1]).lstrip('+')}, {turns:.1f} turns, {valid:.1f} % of the actions valid."
        )
    if len(shares) == 2:
        lines.append(f"- Change: {_change([b - a for a, b in zip(*shares, strict=True)])} points on official games.")
    return lines


def _with_error(rate: float | None, episodes: int) -> str:
    if rate is None:  # every episode ended in an error
        return "n/a"
    error = math.sqrt(rate * (1 - rate) / episodes) if episodes >= FEWEST else 0.0
    return f"{100 * rate:.1f}" + (f" ± {100 * error:.1f}" if error > 0 else "")  # none won, or all: no certainty


def _training(by_method: dict[str, dict[int, dict]]) -> plots.Figure:
    return plots.learning_curves(
        {method: [run["training"]["success_rate"] for run in seeds.values()] for method, seeds in by_method.items()},
        ylabel="success of training episodes, mean of 5 iterations (%)",
        bold="g2po",
    )


def _held_out(by_method: dict[str, dict[int, dict]]) -> plots.Figure:
    """Each run thin, the mean over seeds thick, side by side, with the standard error of one run's rate."""
    made, axes = plots.figure("iteration", "success on 96 held-out games (%)", width=7.5, height=4.8)
    others = [method for method in by_method if method != "g2po"]
    for number, (method, seeds) in enumerate(by_method.items()):
        color, rates = "black" if method == "g2po" else f"C{others.index(method)}", []
        for run in seeds.values():
            shown = [one for one in panels(run) if one["success_rate"] is not None]
            steps = [one["step"] + 0.15 * number for one in shown]
            rates.append([100 * one["success_rate"] for one in shown])
            errors = [100 * math.sqrt(r * (1 - r) / one["episodes"]) for one in shown for r in [one["success_rate"]]]
            axes.errorbar(steps, rates[-1], errors, color=color, alpha=0.4, linewidth=1, capsize=2)
        if len(set(map(len, rates))) == 1:
            axes.plot(steps, [fmean(at) for at in zip(*rates)], color=color, linewidth=2.4, label=method)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return made
