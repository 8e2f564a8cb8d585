"""Analyse the state graphs of a run, as the paper does, and test its state keys.

    g2po report RUN [--output FOLDER] [--gamma X] [--svg]

Reads RUN/trajectories and writes analysis.json and plots: visits per state, spread of the returns of one state, turns
per successful episode, variance of the values compared with the paper's assumptions, and the test of the state keys:
how well the values of each λ predict the returns of held-out episodes. All but the last use mean returns (λ = 1),
regardless of the run's value_lambda.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..arguments import Parser
from ..credit.graph import record
from ..installing import how_to_install
from ..json_text import write_json
from ..runs.changes import description_at, parts_of, told
from ..runs.run_description import read_run
from ..runs.verdict import Tally, verdict
from . import analysis, keys

SIZES = (1, 2, 4, 8, 16, 32)


def analyse(iterations: list[analysis.Iteration], gamma: float | None, described: dict) -> tuple[dict, dict]:
    """Numbers for analysis.json, and what the plots show besides.

    Args:
        gamma: discount; `None`: of each iteration that of the run, by its description `described`.
    """
    gammas = [gamma_of(described, iteration.number) if gamma is None else gamma for iteration in iterations]
    rows, sizes, deviations, turns = [], [], [], []
    for iteration, gamma in zip(iterations, gammas):
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
                "value_errors": analysis.value_errors(iteration.whole.graph(gamma)),
                "turns_to_finish": float(won.mean()) if len(won) else None,
            }
        )
    prediction = keys.examine(*keys.measure(iterations, gammas), [iteration.number for iteration in iterations])
    return {"gamma": gammas[-1], "iterations": rows, "prediction": prediction}, {
        "sizes": np.concatenate(sizes),
        "deviations": np.concatenate(deviations),
        "turns": turns,
    }


def gamma_of(described: dict, iteration: int) -> float:
    """The discount that an iteration was trained with, 0.95 if the run does not say it."""
    return description_at(described, iteration).get("trainer", {}).get("gamma", 0.95)


def verdict_on(iterations: list[analysis.Iteration], run: dict) -> str | None:
    """Return what the run said at its end if there was nothing to learn from, of the iterations that are here."""
    tally = Tally()
    for iteration in iterations:
        everyone = [t for group in iteration.groups for t in group]
        tally.add([[record(t) for t in group] for group in iteration.groups], everyone)
    return verdict(tally, run.get("estimator", {}).get("estimator_name", "g2po"))


def mean_over(rows: list[dict], part: str, name: str) -> float:
    """Mean over the iterations that have such a number; nan if none has."""
    values = np.array([row[part][name] for row in rows])
    return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else float("nan")


def notes(run: dict) -> list[str]:
    """What to mind about values of a run that was trained otherwise than by G2PO with mean returns."""
    name = run.get("estimator", {}).get("estimator_name", "g2po")
    used = run.get("trainer", {}).get("value_lambda", 1.0)
    said = [] if name.startswith("g2po") else [f"The run was trained with {name}: value_lambda is an option of g2po."]
    if used != 1:
        said.append(f"The run was trained with value_lambda {used}; all but the test of keys is about mean returns.")
    changed = list(told(parts_of(run)))
    return [*said, *(["The run was resumed with other settings:"] if changed else []), *(f"  {c}" for c in changed)]


def summary(rows: list[dict]) -> str:
    """A run in some lines: means over its iterations."""

    def mean(part: str, name: str) -> float:
        return mean_over(rows, part, name)

    unfinished = sum(row["unfinished"] for row in rows)
    lines = [
        *([f"{unfinished} lines were not written to their end and are left out"] if unfinished else []),
        f"{len(rows)} iterations, {sum(row['steps'] for row in rows)} steps",
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


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="g2po report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write; default: RUN/report")
    given = "discount per step; default: the run's, or 0.95 if the run does not record it"
    parser.add_argument("--gamma", metavar="X", type=float, help=given)
    parser.add_argument("--svg", action="store_true", help="also write the plots as SVG")
    args = parser.parse_args(argv)
    try:
        from . import plots
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib: {how_to_install('plots')}") from error
    try:
        run = read_run(args.run)
        iterations = analysis.load_iterations(args.run)
        numbers, shown = analyse(iterations, args.gamma, run)
    except ValueError as error:
        raise SystemExit(str(error)) from error

    output = args.output or args.run / "report"
    try:
        write_json(output / "analysis.json", numbers, indent=1)
    except OSError as error:
        said = error.strerror or error
        raise SystemExit(f"{output} cannot be written ({said}): pass --output FOLDER") from error
    rows = numbers["iterations"]
    print(summary(rows))
    if said := verdict_on(iterations, run):
        print(f"\n{said}")
    print("\n".join(["", keys.text(numbers["prediction"]), *notes(run), ""]), flush=True)  # plots take longer
    at = [row["iteration"] for row in rows]
    sizes = [row["group_size"] for row in rows]
    figures = {
        "group_size_dynamics": plots.group_size_dynamics(
            at, [s["mean"] for s in sizes], [s["singleton_steps"] for s in sizes]
        ),
        "group_size_distribution": plots.group_size_distribution(shown["sizes"]),
        "value_variation": plots.value_variation(
            shown["deviations"], mean_over(rows, "value_variation", "varying_share")
        ),
        "turns_to_finish": plots.turns_to_finish(at, shown["turns"]),
        "variances": plots.variances(SIZES, analysis.simulate_variances(SIZES)),
    }
    if log := [entry for entry in analysis.load_log(args.run) if entry.get("episode/success_rate") is not None]:
        times = [{k.removeprefix("time/"): v or 0.0 for k, v in e.items() if k.startswith("time/")} for e in log]
        figures["phase_times"] = plots.phase_times(range(1, len(log) + 1), times)
        success = [entry["episode/success_rate"] for entry in log]
        figures["learning_curve"] = plots.learning_curves({args.run.resolve().name: [success]})
    if curves := keys.curves(numbers["prediction"]):
        figures["prediction_errors"] = plots.prediction_errors(numbers["prediction"]["lambdas"], curves)
    for name, made in figures.items():
        plots.save(made, output, name, args.svg)
    print(f"{output}: analysis.json, {', '.join(figures)} (.png{', .svg' if args.svg else ''})")


if __name__ == "__main__":
    main()
