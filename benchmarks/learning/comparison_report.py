"""The report of `comparison.py`: table.md, results.json and figures, from the files of the runs that are there.

A run is the content of its file (`comparison_runs.py`). The preregistered numbers of a run are its mean success in the
first half of the iterations (primary), and the mean of success over all iterations and on held-out games (secondary).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning import comparison_figures as figures
from benchmarks.learning.comparison_stages import ALL, ARMS, PILOT, RATE_ARMS, REFERENCE, SEEDS, START
from benchmarks.learning.comparison_statistics import (
    Comparison,
    collapsed,
    dunnett,
    first_at,
    first_half,
    over_seeds_and_games,
    paired_interval,
    smallest_effect,
)
from g2po_trl.utils.json import write_json

Run = Mapping[str, Any]
Runs = dict[tuple[str, str, int], Run]  # (stage, arm, seed) -> run

# Runs of the main stage that belong to the tables of others: stage -> arm -> its name there.
BORROWED = {
    "rates": {arm: arm for arm in RATE_ARMS},
    "methods": {arm: arm for arm in (START, REFERENCE, "gigpo", "grpo")},
    "weights": {"grpo": "w 0", REFERENCE: "w 1"},  # GRPO and G2PO, bit for bit
}
ABOUT = f"""# Comparison of methods

Success in percent, mean ± standard deviation over seeds. *First half*: mean success of the training episodes in the
first half of the iterations. *Training*: in all of them. *Held-out*: success after training on tasks that are not
trained on, at the temperature named; at 1.0 each is played twice. *Minus {REFERENCE}*: mean of the differences paired
by seed, in points, with Student's 95 % interval, not corrected for the number of arms. *Collapsed*: runs with less
than 95 % valid completions or a KL above 0.5 in any iteration."""


def load(results: Path) -> Runs:
    """Return every complete run."""
    runs = [json.loads(path.read_text()) for path in sorted((results / "runs").glob("*/*.json"))]
    return {(run["stage"], run["arm"], run["seed"]): run for run in runs}


def primary(run: Run) -> float:
    """Return the mean success of the first half of the iterations."""
    return first_half(run["training"]["success"])


def training(run: Run) -> float:
    """Return the mean success of all iterations."""
    return float(np.mean(run["training"]["success"]))


def held_out(run: Run, temperature: str = "1") -> float | None:
    """Return success on held-out games after training, mean over plays; `None`: not played."""
    played = run["held_out"][-1].get(temperature) if run["held_out"] else None
    return None if played is None else float(np.mean(played["success_rate"]))


def score(run: Run) -> float | None:
    """Return WebShop's score on held-out tasks at temperature 1, a fraction; `None` where there is none."""
    played = run["held_out"][-1].get("1", {}).get("score") if run["held_out"] else None
    return None if played is None else float(np.mean(played))


def secondary(run: Run) -> float:
    """Return the mean of training and held-out success at temperature 1."""
    return (training(run) + held_out(run)) / 2


def games(run: Run, temperature: str) -> np.ndarray:
    """Return (games,) the share of plays won; an error of the environment counts as lost."""
    return np.mean([[letter == "1" for letter in won] for won in run["held_out"][-1][temperature]["won"]], axis=0)


def stage_runs(runs: Runs, stage: str) -> dict[str, dict[int, Run]]:
    """Return arm -> seed -> run of a stage, with those of the main stage that its table needs."""
    found: dict[str, dict[int, Run]] = {}
    own = {key: run for key, run in runs.items() if key[0] == stage}
    for arm, name in BORROWED.get(stage, {}).items() if own else ():
        for (where, which, seed), run in runs.items():
            if where == "main" and which == arm and (arm == START or seed in SEEDS[stage]):
                found.setdefault(name, {})[seed] = run
    order = {arm: at for at, arm in enumerate([START, *ARMS])}
    for (_, arm, seed), run in sorted(own.items(), key=lambda item: (order.get(item[0][1], len(order)), item[0])):
        found.setdefault(arm, {})[seed] = run
    if stage == "weights":
        return dict(sorted(found.items(), key=lambda item: float(item[0].removeprefix("w "))))
    return found


def percent(values: Sequence[float | None]) -> str:
    """Return mean ± sample standard deviation, in percent; fewer than three values, or equal ones, have none."""
    values = [value for value in values if value is not None]
    if not values:
        return "–"
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 2 and len(set(values)) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


def points(mean: float, interval: tuple[float, float] | None) -> str:
    """Return a difference in points with its interval."""
    return f"{100 * mean:+.1f}" + (f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]" if interval else "")


def against(arms: Mapping[str, Mapping[int, Run]], arm: str, reference: str, number: Callable[[Run], float]) -> str:
    """Return a cell: the arm less the reference, paired by seed."""
    common = sorted(set(arms[arm]) & set(arms.get(reference, {})))
    if arm == reference or not common:
        return ""
    differences = [number(arms[arm][seed]) - number(arms[reference][seed]) for seed in common]
    return points(float(np.mean(differences)), paired_interval(differences))


def table(arms: Mapping[str, Mapping[int, Run]], reference: str) -> list[str]:
    """Return the Markdown table of a stage."""
    columns = ["arm", "seeds", "first half", f"minus {reference}", "training", "held-out 1.0", f"minus {reference}"]
    columns += ["held-out 0.4", "turns to success", "collapsed"]
    scored = any(score(run) is not None for seeds in arms.values() for run in seeds.values())
    columns += ["held-out score 1.0", f"minus {reference}"] if scored else []
    lines = [row(columns), "|" + "---|" * len(columns)]
    for arm, seeds in arms.items():
        of = list(seeds.values())
        learned = [run for run in of if "training" in run and arm != START]
        cells = [arm, str(len(of)), percent([primary(run) for run in learned])]
        cells += [
            against(arms, arm, reference, primary) if learned else "",
            percent([training(run) for run in learned]),
        ]
        cells.append(percent([held_out(run) for run in of]))
        tested = learned and all(held_out(run) is not None for run in of)
        cells.append(against(arms, arm, reference, held_out) if tested else "")
        cells.append(percent([held_out(run, "0.4") for run in of]))
        turns = [
            t
            for run in of
            if run["held_out"]
            for t in run["held_out"][-1].get("1", {}).get("turns_to_success", [])
            if t
        ]
        cells += [f"{np.mean(turns):.1f}" if turns else "–", lost_format(seeds) if learned else ""]
        if scored:
            cells += [percent([score(run) for run in of]), against(arms, arm, reference, score) if learned else ""]
        lines.append(row(cells))
    return lines


def row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def lost_format(seeds: Mapping[int, Run]) -> str:
    """Return how many runs collapsed, and their seeds."""
    lost = [str(seed) for seed, run in sorted(seeds.items()) if collapsed(run["training"])]
    return f"{len(lost)} (seed {', '.join(lost)})" if lost else "0"


def tests(runs: Runs) -> dict[str, Any]:
    """Return the preregistered tests: number -> with and without collapsed runs -> `Comparison`."""
    of = {key[1:]: run for key, run in runs.items() if key[0] == "main" and key[1] in ARMS}
    kept = {key: run for key, run in of.items() if not collapsed(run["training"])}
    found: dict[str, Any] = {}
    for name, number in (("first half", primary), ("training and held-out", secondary)):
        for which, chosen in (("all runs", of), ("without collapsed runs", kept)):
            found[f"{name}, {which}"] = dunnett({key: number(run) for key, run in chosen.items()}, REFERENCE)
    return {name: comparison for name, comparison in found.items() if comparison is not None}


def tests_table(found: Mapping[str, Comparison]) -> list[str]:
    """Return the Markdown of the tests."""
    lines = []
    comparisons, seeds = len(ARMS) - 1, len(SEEDS["main"])
    for name, comparison in found.items():
        about = (
            f"**{name}**: noise of a run {100 * comparison.noise:.1f} points, {comparison.freedom} degrees of freedom"
        )
        if comparison.freedom == comparisons * (seeds - 1):  # complete blocks
            effect = smallest_effect(comparison.noise, seeds, comparisons)
            about += f"; a true difference of {100 * effect:.1f} points is found with probability 0.8"
        if left_out := [arm for arm in ARMS if arm not in (REFERENCE, *comparison.differences)]:
            about += f"; no run of {', '.join(left_out)} is left, so p is corrected for fewer arms"
        lines += [
            f"{about}.",
            "",
            row([f"arm minus {REFERENCE}", "points, simultaneous 95 % interval", "p (Dunnett)", "significant"]),
            "|---|---|---|---|",
        ]
        for arm in sorted(comparison.differences, key=list(ARMS).index):
            of = comparison.differences[arm]
            p = f"{of.p:.3f}" if of.p >= 0.001 else "< 0.001"
            lines.append(row([arm, points(of.mean, of.interval), p, "yes" if of.significant else "no"]))
        lines.append("")
    return lines


def new_games(arms: Mapping[str, Mapping[int, Run]]) -> dict[str, dict[str, Any]]:
    """Return by temperature and arm the difference to the reference on held-out games, over seeds and games."""
    found: dict[str, dict[str, Any]] = {}
    for temperature in ("1", "0.4"):
        for arm in arms:
            common = sorted(set(arms[arm]) & set(arms.get(REFERENCE, {})))
            if arm in (START, REFERENCE) or len(common) < 2:
                continue
            both = [arms[which][s] for which in (arm, REFERENCE) for s in common]
            if len({run["held_out"][-1][temperature]["games"] for run in both}) > 1:
                raise ValueError(f"runs of {arm} and {REFERENCE} played different held-out games")
            pairs = [(games(arms[arm][s], temperature), games(arms[REFERENCE][s], temperature)) for s in common]
            mean, interval = over_seeds_and_games(np.array([a - b for a, b in pairs]))
            found.setdefault(temperature, {})[arm] = {"mean": mean, "interval": interval}
    return found


def treasure_table(arms: Mapping[str, Mapping[int, Run]]) -> list[str]:
    """Return the Markdown of Treasure: iterations to 80 % of each seed, mean of three iterations."""
    lines = [row(["arm", "iterations to 80 %, by seed", "first ten iterations", "last three", "hours a run"])]
    lines.append("|" + "---|" * 5)
    for arm, seeds in arms.items():
        of = [run for _, run in sorted(seeds.items())]
        reached = [(first_at(run["training"]["success"]), run["iterations"]) for run in of]
        cells = [arm, ", ".join(str(at) if at else f"> {length}" for at, length in reached)]
        for part in (slice(10), slice(-3, None)):
            cells.append(percent([float(np.mean(run["training"]["success"][part])) for run in of]))
        lines.append(row([*cells, f"{np.mean([run['seconds'] for run in of]) / 3600:.1f}"]))
    return lines


def progress_table(arms: Mapping[str, Mapping[int, Run]]) -> list[str]:
    """Return the Markdown of runs whose panels were played several times: success at 1.0 / 0.4 by iteration."""
    lines = [row(["arm", "seed", "held-out at 1.0 / 0.4 after iteration", "hours"]), "|---|---|---|---|"]
    for arm, seeds in arms.items():
        for seed, run in sorted(seeds.items()):
            shown = []
            for panel in run["held_out"]:
                rates = [percent([float(np.mean(panel[t]["success_rate"]))]) for t in ("1", "0.4") if t in panel]
                shown.append(f"{panel['until'] or 'end'}: {' / '.join(rates)}")
            lines.append(row([arm, str(seed), ", ".join(shown), f"{run['seconds'] / 3600:.1f}"]))
    return lines


def prompted_table(arms: Mapping[str, Mapping[int, Run]]) -> list[str]:
    """Return the Markdown of prompted agents."""
    columns = ["agent", "games", "held-out 0.4", "valid completions", "turns"]
    lines = [row(columns), "|" + "---|" * len(columns)]
    for arm, seeds in arms.items():
        for run in seeds.values():
            played = run["held_out"][-1]["0.4"]
            rates = [percent(played["success_rate"]), percent(played["valid_action_ratio"])]
            lines.append(row([arm, str(len(played["won"][0])), *rates, f"{np.mean(played['turns']):.1f}"]))
    return lines


def pilot_winner(results: Path) -> str | None:
    """Return how the pilot's better arm trains its weights, by held-out success at temperature 1; `None`: not over."""
    arms = stage_runs(load(results), "smollm2-pilot")
    if not set(PILOT) <= set(arms):
        return None
    return max(PILOT, key=lambda arm: np.mean([held_out(run) for run in arms[arm].values()]))


def report(results: Path) -> str:
    """Write table.md, results.json and the figures of what is there; return the table."""
    runs = load(results)
    if not runs:
        return "No run yet."
    parts, numbers = [ABOUT], {}
    for stage in ALL:
        arms = stage_runs(runs, stage)
        if not arms:
            continue
        own = [run for key, run in runs.items() if key[0] == stage]
        hours = sum(run["cpu_seconds"] for run in own) / 3600
        commits = ", ".join(sorted({run["commit"][:10] for run in own}))
        parts.append(f"## {stage}\n\n{len(own)} runs, {hours:.1f} hours of CPU, commits {commits}.")
        if stage == "treasure":
            parts.append("\n".join(treasure_table(arms)))
        elif stage == "prompted":
            parts.append("\n".join(prompted_table(arms)))
        elif stage.startswith("smollm2"):
            parts.append("\n".join(progress_table(arms)))
        else:
            parts.append("\n".join(table(arms, "w 1" if stage == "weights" else REFERENCE)))
        numbers[stage] = {arm: summary(seeds) for arm, seeds in arms.items()}
        if stage == "main":
            missing = len(ARMS) * len(SEEDS["main"]) - sum(len(arms.get(arm, {})) for arm in ARMS)
            if found := new_games(arms):
                numbers["held-out, over seeds and games"] = found
                parts.append("\n".join(new_games_table(found)))
            if missing:  # the stopping rule: nothing is tested before all runs are there
                parts.append(f"{missing} runs are missing: no test before they are complete.")
            else:
                tested = tests(runs)
                numbers["tests"] = {name: as_numbers(comparison) for name, comparison in tested.items()}
                parts.append("### Tests\n\n" + "\n".join(tests_table(tested)))
    write_json(results / "results.json", numbers, indent=1)
    text = "\n\n".join(parts) + "\n"
    (results / "table.md").write_text(text)
    figures.draw({stage: stage_runs(runs, stage) for stage in ALL}, numbers, results)
    return text


def summary(seeds: Mapping[int, Run]) -> dict[str, Any]:
    """Return an arm's numbers, one for each seed."""
    of = [run for _, run in sorted(seeds.items())]
    found: dict[str, Any] = {"seeds": sorted(seeds)}
    for name, number in {"1.0": held_out, "0.4": lambda run: held_out(run, "0.4")}.items():
        found[f"held-out {name}"] = [number(run) for run in of]
    if all("training" in run for run in of):
        found |= {"first half": [primary(run) for run in of], "training": [training(run) for run in of]}
        found["collapsed"] = [collapsed(run["training"]) for run in of]
    return found


def new_games_table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the Markdown of `new_games`."""
    columns = [f"arm minus {REFERENCE}, held-out", *(f"temperature {float(t):.1f}" for t in found)]
    lines = ["95 % intervals over seeds *and* games, not corrected:", "", row(columns), "|" + "---|" * len(columns)]
    for arm in next(iter(found.values()), {}):
        lines.append(row([arm, *(points(of[arm]["mean"], of[arm]["interval"]) for of in found.values())]))
    return lines


def as_numbers(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON."""
    arms = {arm: {"mean": of.mean, "interval": of.interval, "p": of.p} for arm, of in comparison.differences.items()}
    return {"noise": comparison.noise, "degrees_of_freedom": comparison.freedom, "differences": arms}
