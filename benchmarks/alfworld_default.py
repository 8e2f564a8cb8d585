"""The default recipe over seeds, G2PO and GRPO (w=0) from the same starting model: the numbers of the README.

    python benchmarks/alfworld_default.py --output benchmarks/results/alfworld_default [--seeds 0 1 2] [--jobs 1]

Each run is the recipe a user runs, with `--seed` and `--step_advantage_weight` set; one that is complete is not run
again, and one that was interrupted goes on. Prints the command, the machine and every value, and writes them to
OUTPUT/results.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "train_alfworld.py"
METHODS = {"g2po": 1.0, "grpo": 0.0}


def run(method: str, seed: int, output: Path, extra: list[str]) -> dict:
    """One run; its evaluations before and after and its training curve."""
    folder = output / "runs" / f"{method}-seed{seed}"
    done = folder / "done.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["--seed", seed, "--step_advantage_weight", METHODS[method], "--output_dir", folder, *extra]
        flags += ["--resume_from_checkpoint", "auto"]  # one that was interrupted
        command = [sys.executable, str(RECIPE), *map(str, flags)]
        print("$ python recipes/train_alfworld.py", *map(str, flags), flush=True)
        started = time.time()
        with (folder / "log.txt").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        done.write_text(json.dumps({"seconds": round(time.time() - started, 1)}))
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = [round(entry["episode/success_rate"], 4) for entry in history if "episode/success_rate" in entry]
    return {
        "method": method,
        "seed": seed,
        "before": evaluations[0]["success_rate"],
        "after": evaluations[-1]["success_rate"],
        "turns_before": evaluations[0]["turns"],
        "turns_after": evaluations[-1]["turns"],
        "by_type_before": evaluations[0]["success_rate_by_type"],
        "by_type_after": evaluations[-1]["success_rate_by_type"],
        "valid_after": evaluations[-1]["valid_action_ratio"],
        "episodes": evaluations[-1]["episodes"],
        "panel": evaluations[-1]["panel"],
        "training_success": curve,
        **json.loads(done.read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args, extra = parser.parse_known_args()
    jobs = [(method, seed) for seed in args.seeds for method in args.methods]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda job: run(*job, args.output, extra), jobs))

    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    (args.output / "results.json").write_text(json.dumps({"machine": machine, "runs": results}, indent=1))
    print(json.dumps(machine))
    print(f"{'method':8}{'seed':>5}{'before':>9}{'after':>9}{'change':>9}{'turns':>14}{'seconds':>9}")
    for r in results:
        turns = f"{r['turns_before']:.1f} -> {r['turns_after']:.1f}"
        print(
            f"{r['method']:8}{r['seed']:>5}{100 * r['before']:>9.1f}{100 * r['after']:>9.1f}"
            f"{100 * (r['after'] - r['before']):>+9.1f}{turns:>14}{r['seconds']:>9.0f}"
        )
    for method in args.methods:
        changes = [100 * (r["after"] - r["before"]) for r in results if r["method"] == method]
        spread = f" ± {stdev(changes):.1f}" if len(changes) > 1 else ""
        print(f"{method}: mean change {mean(changes):+.1f}{spread} points over {len(changes)} seeds")


if __name__ == "__main__":
    main()
