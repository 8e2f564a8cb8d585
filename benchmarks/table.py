"""The paper's table with a language model: every method from the same starting model, under equal budgets.

    python benchmarks/table.py --output benchmarks/results/table [--seeds 0 1 2] [--methods g2po grpo …] [--jobs 2]

Each run is a recipe that a user runs, with `--seed` and the method's flags; all else is the default: the tiny model,
generated ALFWorld games, the same episodes, optimizer steps and learning rate. A run that is complete is not run
again, and one that was interrupted goes on from its last iteration. Writes and prints the command, the machine, every
value (`results.json`), the table (`table.md`) and learning curves (`curves.svg`, `curves.png`).
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

from g2po_trl import read_jsonl
from g2po_trl.report import plots

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
METHODS = {
    "ppo": ("train_alfworld_ppo.py", []),
    "rloo": ("train_alfworld.py", ["--advantage_estimator", "rloo"]),
    "grpo": ("train_alfworld.py", ["--advantage_estimator", "grpo"]),
    "gigpo": ("train_alfworld.py", ["--advantage_estimator", "gigpo"]),
    "g2po without A_NC": ("train_alfworld.py", ["--use_node_advantage", "false"]),
    "g2po without A_EC": ("train_alfworld.py", ["--use_edge_advantage", "false"]),
    "g2po without aggregation": ("train_alfworld.py", ["--use_group_aggregation", "false"]),
    "g2po": ("train_alfworld.py", []),
}
TYPES = {
    "pick_and_place_simple": "Pick",
    "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean",
    "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool",
    "pick_two_obj_and_place": "Pick2",
}


def run(method: str, seed: int, output: Path, threads: int, extra: list[str]) -> dict:
    """One run: what it was before and after, and its training curve."""
    folder = output / "runs" / f"{method.replace(' ', '-')}-seed{seed}"
    done = folder / "done.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        recipe, flags = METHODS[method]
        # The layout the committed values were made with; others give the same gradient, but for the last bits.
        flags = ["--token_layout", "padded", "--seed", seed, *flags, "--output_dir", folder, *extra]
        flags += ["--resume_from_checkpoint", "auto"]
        print(f"$ python recipes/{recipe}", *map(str, flags), flush=True)
        started = time.time()
        with (folder / "log.txt").open("a") as log:
            subprocess.run(
                [sys.executable, str(RECIPES / recipe), *map(str, flags)],
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        done.write_text(json.dumps({"seconds": round(time.time() - started, 1)}))
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    before, after = evaluations[0], evaluations[-1]
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    played = read_jsonl(folder / "trajectories" / f"eval-{after['step']:06d}.jsonl")
    won = [len(trajectory.steps) for trajectory in played if trajectory.success]
    return {
        "method": method,
        "seed": seed,
        "iterations": after["step"],
        "before": before["success_rate"],
        "after": after["success_rate"],
        "by_type_before": before["success_rate_by_type"],
        "by_type_after": after["success_rate_by_type"],
        "turns_per_success": mean(won) if won else None,
        "turns_after": after["turns"],
        "valid_after": after["valid_action_ratio"],
        "episodes": after["episodes"],
        "panel": after["panel"],
        "training_success": [
            round(entry["episode/success_rate"], 4) for entry in history if "episode/success_rate" in entry
        ],
        **json.loads(done.read_text()),
    }


def spread(values: list[float]) -> str:
    """Mean ± standard deviation over seeds."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def table(results: list[dict]) -> str:
    """Markdown: success by task type and over all, in percent, the mean of training, and turns of a won episode."""
    lines = [
        f"| method | seeds | {' | '.join(TYPES.values())} | All | mean of training | turns of a win |",
        f"|---|---|{'---|' * len(TYPES)}---|---|---|",
    ]
    first = results[0]
    before = " | ".join(f"{100 * first['by_type_before'][kind]:.1f}" for kind in TYPES)
    lines.append(f"| before training | | {before} | {100 * first['before']:.1f} | | |")
    for method in METHODS:
        runs = [r for r in results if r["method"] == method]
        if not runs:
            continue
        cells = [spread([100 * r["by_type_after"][kind] for r in runs]) for kind in TYPES]
        cells += [
            f"**{spread([100 * r['after'] for r in runs])}**",
            spread([100 * mean(r["training_success"]) for r in runs]),
            spread([r["turns_per_success"] for r in runs if r["turns_per_success"]]),
        ]
        lines.append(f"| {method} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(results: list[dict]) -> list[str]:
    """G2PO against each other method, seed by seed: the seeds play the same tasks in the same order."""
    after = {(r["method"], r["seed"]): 100 * r["after"] for r in results}
    lines = []
    for method in METHODS:
        pairs = [
            after["g2po", seed] - value
            for (name, seed), value in after.items()
            if name == method != "g2po" and ("g2po", seed) in after
        ]
        if pairs:
            lines.append(f"g2po - {method}: {spread(pairs)} points ({', '.join(f'{d:+.1f}' for d in pairs)})")
    return lines


def plot(results: list[dict], output: Path) -> None:
    curves = {method: [r["training_success"] for r in results if r["method"] == method] for method in METHODS}
    made = plots.learning_curves(
        {method: seeds for method, seeds in curves.items() if seeds},
        ylabel="success of training episodes, mean of 5 iterations (%)",
    )
    plots.save(made, output, "curves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args, extra = parser.parse_known_args()
    args.output.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    jobs = [(method, seed) for seed in args.seeds for method in args.methods]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda job: run(*job, args.output, threads, extra), jobs))

    facts = {
        "command": " ".join(["python benchmarks/table.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jobs": args.jobs,
        "threads": threads,
    }
    (args.output / "results.json").write_text(json.dumps({**facts, "runs": results}, indent=1))
    print(json.dumps(facts))
    for r in results:
        print(
            f"{r['method']:25} seed {r['seed']}: {100 * r['before']:5.1f} -> {100 * r['after']:5.1f} %, "
            f"{r['iterations']} iterations, {r['seconds']:.0f} s"
        )
    (args.output / "table.md").write_text(table(results) + "\n")
    print(table(results), *differences(results), sep="\n")
    plot(results, args.output)


if __name__ == "__main__":
    main()
