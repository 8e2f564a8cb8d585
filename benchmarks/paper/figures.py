"""The paper's figures of a run: learning curve, phases, visits, variation of returns, turns, variances.

python -m benchmarks.paper.figures RUN [--output FOLDER] [--svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.paper import analysis, plots
from g2po_trl.report.summary import gamma_of
from g2po_trl.runs.iterations import load_iterations, load_log
from g2po_trl.runs.run_json import read_run
from g2po_trl.utils.json import write_json

SIZES = (1, 2, 4, 8, 16, 32)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="default: RUN/figures")
    parser.add_argument("--svg", action="store_true")
    args = parser.parse_args(argv)
    run, iterations, output = read_run(args.run), load_iterations(args.run), args.output or args.run / "figures"
    graphs = [iteration.graph(gamma_of(run)) for iteration in iterations]
    at = [iteration.number for iteration in iterations]
    sizes, varied = [analysis.group_sizes(one) for one in graphs], [analysis.value_variation(one) for one in graphs]
    turns = [analysis.turns_to_finish(t for group in one.groups for t in group) for one in iterations]
    figures = {
        "group_size_dynamics": plots.group_size_dynamics(
            at, [one["mean"] for one in sizes], [one["singleton_steps"] for one in sizes]
        ),
        "group_size_distribution": plots.group_size_distribution(np.concatenate([one["sizes"] for one in sizes])),
        "value_variation": plots.value_variation(
            np.concatenate([one["deviations"] for one in varied]), np.nanmean([one["varying_share"] for one in varied])
        ),
        "turns_to_finish": plots.turns_to_finish(at, turns),
        "variances": plots.variances(SIZES, analysis.simulate_variances(SIZES)),
    }
    if log := [entry for entry in load_log(args.run) if entry.get("episode/success_rate") is not None]:
        times = [{k.removeprefix("time/"): v or 0.0 for k, v in e.items() if k.startswith("time/")} for e in log]
        figures["phase_times"] = plots.phase_times(range(1, len(log) + 1), times)
        figures["learning_curve"] = plots.success_of_run([entry["episode/success_rate"] for entry in log])
    errors = {number: analysis.value_errors(one) for number, one in zip(at, graphs)}
    write_json(output / "value_errors.json", errors)
    for name, made in figures.items():
        plots.save(made, output, name, args.svg)
    print(f"{output}: {', '.join(figures)}")


if __name__ == "__main__":
    main()
