"""Summarise a run in five lines: success, where groups fail, what recurs, the verdict, what to do.

    g2po report RUN                 # the five lines; plots and numbers in RUN/report
    g2po report RUN --details       # the statistics too

RUN is the folder of a training run or of `g2po credit`. The statistics are the paper's analyses of the state graphs,
with mean returns (λ = 1) regardless of the run's value_lambda, and the test of the state keys: how well the values of
each λ predict the returns of held-out episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...report import analysis
from ...report import state_key_test as keys
from ...report.plain import five_lines
from ...report.summary import SIZES, analyse, mean_over, notes, summary, verdict_on
from ...runs.run_json import read_run
from ...runs.summary import before_and_after
from ...utils.extras import install_command
from ...utils.json import read_json_lines, write_json
from ...utils.parser import Parser


def _by_iteration(evaluations: Sequence[dict[str, Any]], run: dict[str, Any]) -> list[tuple[float, float]]:
    """Return pairs of iteration and success of the reported panel."""
    steps = run.get("optimizer_steps_per_iteration")
    if not evaluations or not steps:
        return []
    name = before_and_after(evaluations)[0].get("name")
    shown = [one for one in evaluations if one.get("name") == name and one.get("success_rate") is not None]
    return [(one["step"] / steps, one["success_rate"]) for one in shown]


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="g2po report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run, or --output of `g2po credit`")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write; default: RUN/report")
    given = "discount per step; default: the run's, or 0.95 if the run does not record it"
    parser.add_argument("--gamma", metavar="X", type=float, help=given)
    parser.add_argument("--details", action="store_true", help="print the statistics too")
    parser.add_argument("--svg", action="store_true", help="also write the plots as SVG")
    args = parser.parse_args(argv)
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
        raise SystemExit(f"{output} cannot be written ({error.strerror or error}): pass --output FOLDER") from error
    rows, path = numbers["iterations"], args.run / "evaluations.jsonl"
    evaluations = read_json_lines(path) if path.is_file() else []
    verdict = verdict_on(iterations, run, analysis.load_replaced(args.run))
    print(five_lines(iterations, numbers, run, evaluations, verdict), end="\n\n", flush=True)  # plots take longer
    if args.details:
        print("\n".join([summary(rows, run), "", keys.text(numbers["prediction"]), *notes(run), ""]), flush=True)
    statistics = "" if args.details else "; --details prints the statistics"
    try:
        from ...report import plots
    except ImportError:
        print(f"{output}: analysis.json{statistics}. Plots need matplotlib: {install_command('plots')}")
        return
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
        figures["learning_curve"] = plots.success_of_run(success, _by_iteration(evaluations, run))
    if curves := keys.curves(numbers["prediction"]):
        figures["prediction_errors"] = plots.prediction_errors(numbers["prediction"]["lambdas"], curves)
    for name, made in figures.items():
        plots.save(made, output, name, args.svg)
    print(f"{output}: analysis.json, {', '.join(figures)} (.png{', .svg' if args.svg else ''}){statistics}")
