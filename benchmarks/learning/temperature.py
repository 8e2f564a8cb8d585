"""How much of a run's gain is left at a lower sampling temperature? The initial and the trained model on one panel.

    make train && python -m benchmarks.learning.temperature runs/alfworld-tiny --output benchmarks/results/temperature

Training makes a policy more certain. At temperature 1 certainty alone wins games; at 0.4 the initial model has it too.
Each model plays the run's panel by `g2po evaluate`, `--seeds` times at each temperature (6 minutes on two idle cores);
what was played before in WORK is not played again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.common import facts, write_results
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl.runs.run_json import read_run
from g2po_trl.trajectory import read_jsonl


def play(model: Path, run: Path, temperature: float, seeds: int, folder: Path) -> dict[str, list[bool]]:
    """Success of each task, once a seed."""
    options = {"model": model, "run": run, "temperature": temperature, "seeds": seeds, "output": folder}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "g2po_trl", "evaluate", *words], check=True)
    won = defaultdict(list)
    for seed in range(seeds):
        for trajectory in read_jsonl(folder / "trajectories" / f"direct-{seed}.jsonl"):
            won[trajectory.task_id].append(trajectory.outcome == "success")
    return {task: won[task] for task in sorted(won)}


def rate(won: dict[str, list[bool]]) -> dict[str, float | list[float]]:
    """Success in percent: of each seed, their mean, and the sample standard deviation over seeds."""
    by_seed = 100 * np.mean(list(won.values()), axis=0)
    return {"by_seed": by_seed.tolist(), "mean": float(by_seed.mean()), "std": float(by_seed.std(ddof=1))}


def change(before: dict[str, list[bool]], after: dict[str, list[bool]]) -> dict[str, float]:
    """Mean change of a game's success in percentage points, and its standard error over games."""
    if before.keys() != after.keys():
        raise ValueError("the two evaluations played other games: give each its own WORK")
    differences = [100 * (np.mean(after[task]) - np.mean(before[task])) for task in before]
    error = np.std(differences, ddof=1) / np.sqrt(len(differences))
    return {"mean": float(np.mean(differences)), "standard_error": float(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output_dir of a run of the default recipe")
    parser.add_argument("--start", type=Path, default=tiny_model_path(), help="its initial model")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.4])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("evaluations/temperature"), help="trajectories")
    parser.add_argument("--output", type=Path, required=True, help="results.json")
    args = parser.parse_args()
    results = {}
    for temperature in args.temperatures:
        played = {
            name: play(model, args.run, temperature, args.seeds, args.work / f"{name}-{temperature:g}")
            for name, model in (("initial", args.start), ("trained", args.run))
        }
        results[f"{temperature:g}"] = {
            **{name: rate(won) for name, won in played.items()},
            "change": change(played["initial"], played["trained"]),
            "won": {name: {task: sum(of) for task, of in won.items()} for name, won in played.items()},
        }
    described = read_run(args.run)
    found = {
        **facts(),
        "versions": described["versions"],
        "training": {name: described["trainer"][name] for name in ("seed", "max_steps", "learning_rate")},
    }
    write_results(args.output, {**found, "seeds": args.seeds, "temperatures": results})
    for temperature, of in results.items():
        rates = ((name, of[name]) for name in ("initial", "trained"))
        means = ", ".join(f"{name} {one['mean']:.1f} ± {one['std']:.1f} %" for name, one in rates)
        gain = of["change"]
        print(f"temperature {temperature}: {means}; change {gain['mean']:+.1f} ± {gain['standard_error']:.1f} points")


if __name__ == "__main__":
    main()
