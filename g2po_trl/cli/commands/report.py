"""Analyse the state graphs of a run, as the paper does, and test its state keys.

    g2po report RUN [--output FOLDER] [--gamma X] [--svg]

RUN is the folder of a training run or of `g2po credit`. Reads RUN/trajectories and writes analysis.json and plots:
visits per state, spread of the returns of one state, turns per successful episode, variance of the values compared
with the paper's assumptions, and the test of the state keys: how well the values of each λ predict the returns of
held-out episodes. All but the last use mean returns (λ = 1), regardless of the run's value_lambda.
"""

from __future__ import annotations

from pathlib import Path

from ...report import analysis
from ...report import state_key_test as keys
from ...report.summary import SIZES, analyse, mean_over, notes, summary, verdict_on
from ...runs.run_json import read_run
from ...utils.extras import install_command
from ...utils.json import write_json
from ...utils.parser import Parser


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="g2po report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run, or --output of `g2po credit`")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write; default: RUN/report")
    given = "discount per step; default: the run's, or 0.95 if the run does not record it"
    parser.add_argument("--gamma", metavar="X", type=float, help=given)
    parser.add_argument("--svg", action="store_true", help="also write the plots as SVG")
    args = parser.parse_args(argv)
    try:
        from ...report import plots
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib: {install_command('plots')}") from error
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
    rows = numbers["iterations"]
    print(summary(rows, run))
    if verdict := verdict_on(iterations, run, analysis.load_replaced(args.run)):
        print(f"\n{verdict}")
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
