"""Which λ do the data of finished runs prefer? The test of `python -m g2po_trl.report`, over several runs.

    python benchmarks/report_lambdas.py RUN [RUN …] --output benchmarks/results/report_lambdas

RUN is the output_dir of a run with its trajectories, e.g. of `benchmarks/methods.py` or `benchmarks/keys.py`. Each
episode of a group is left out once and its returns are predicted by values that the others give its states, made with
each λ (docs/hyperparameters.md). Takes seconds a run. Writes OUTPUT/results.json and prints a table of changes of the
squared error relative to λ = 1, in percent, with 95 % intervals over groups.
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from g2po_trl.json_text import write_json
from g2po_trl.report import keys
from g2po_trl.report.analysis import load_iterations
from g2po_trl.runs.run_description import read_run


def examined(run: Path) -> dict[str, Any]:
    """What the run was trained with, and what its episodes say."""
    described, iterations = read_run(run), load_iterations(run)
    trainer = described["trainer"]
    found = keys.examine(*keys.measure(iterations, trainer["gamma"]), [iteration.number for iteration in iterations])
    trained = {name: trainer.get(name) for name in ("advantage_estimator", "value_lambda", "seed", "gamma")}
    return {"key": described["script"]["key"], **trained, "iterations": len(iterations), "prediction": found}


def cell(value: float | None, interval: list[float] | None) -> str:
    ends = "" if interval is None else " [{:+.1f}, {:+.1f}]".format(*(100 * end for end in interval))
    return "" if value is None else f"{100 * value:+.1f}{ends}"


def lines(runs: list[dict[str, Any]]) -> list[str]:
    """The table, all steps of each run, then states that other episodes visited often."""
    lambdas = runs[0]["prediction"]["lambdas"][1:]
    head = ["trained with", "key", "seed", "states", "error, λ = 1", *(f"λ = {value:g}, %" for value in lambdas)]
    made = [f"| {' | '.join([*head, 'share among steps of one action, %'])} |", "|---" * (len(head) + 1) + "|"]
    for run in runs:
        for row in run["prediction"]["rows"]:
            if row["iterations"] is not None or not row["steps"]:
                continue
            intervals = row["interval"] or [None] * len(row["mean_squared_error"])  # too few groups
            cells = [cell(*both) for both in zip(row["relative"] or intervals, intervals)][1:]
            share = run["prediction"]["hidden_share"]
            hidden = "" if row["visits"] or share is None else f"{100 * share:.0f}"
            first = [run["advantage_estimator"], run["key"], str(run["seed"]), keys.label(row)]
            error = f"{row['mean_squared_error'][0]:.2f}"
            made.append(f"| {' | '.join([*first, error, *cells, hidden])} |")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output_dir of a run")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = [examined(run) for run in args.runs]
    facts = {"versions": {name: version(name) for name in ("g2po-trl", "numpy")}, "python": platform.python_version()}
    write_json(args.output / "results.json", facts | {"machine": platform.machine(), "seed of draws": 0, "runs": runs})
    print("\n".join(lines(runs)))


if __name__ == "__main__":
    main()
