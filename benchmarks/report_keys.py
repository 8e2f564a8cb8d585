"""Does the test of keys (`python -m g2po_trl.report`) find bad ones? One run's ALFWorld episodes, with other keys.

    make train && python benchmarks/report_keys.py runs/alfworld-tiny --output benchmarks/results/report_keys

The episodes stay the same and only what counts as one state changes. Takes a quarter of a minute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from g2po_trl.json_text import write_json
from g2po_trl.report import keys
from g2po_trl.report.analysis import Iteration, load_iterations
from g2po_trl.runs.run_description import read_run

KEYS = {
    "the run's own key": lambda steps, place: steps[place].key,
    "this and the last state's own key": lambda steps, place: "\n".join(s.key for s in steps[: place + 1][-2:]),
    "the observation without the admissible actions": lambda steps, place: steps[place].observation,
    "the first three words of the observation": lambda steps, place: " ".join(steps[place].observation.split()[:3]),
    "all states are one": lambda steps, place: "",
}


def with_key(iteration: Iteration, key) -> Iteration:
    def changed(trajectory):
        steps = trajectory.steps
        return replace(trajectory, steps=[replace(s, state_key=key(steps, place)) for place, s in enumerate(steps)])

    return Iteration(iteration.number, [[changed(trajectory) for trajectory in group] for group in iteration.groups])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output_dir of a run of ALFWorld")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    described, iterations = read_run(args.run), load_iterations(args.run)
    gamma = described["trainer"]["gamma"]
    found = {}
    for name, key in KEYS.items():
        played = [with_key(iteration, key) for iteration in iterations]
        found[name] = keys.examine(*keys.measure(played, gamma), [iteration.number for iteration in played])
        print(f"{name}\n{keys.text(found[name])}\n")
    trained = {name: described["trainer"].get(name) for name in ("seed", "advantage_estimator", "value_lambda")}
    write_json(
        args.output / "results.json",
        {"trainer": trained, "versions": described["versions"], "gamma": gamma, "keys": found},
    )


if __name__ == "__main__":
    main()
