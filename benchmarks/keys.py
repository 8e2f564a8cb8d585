"""What should tell ALFWorld's states apart? The default recipe with the released code's key and with `key: memory`.

    python benchmarks/keys.py --output benchmarks/results/keys [--seeds 0 1 2] [--keys released memory] [--jobs 1]

Each run is what `make train` runs, with `--seed` and `--key`. A run that is complete is not run again, and one that
was interrupted goes on from its last iteration. The training episodes of every run are then replayed with both keys,
so that the keys are compared on the same steps:

- within: the share of the variance of returns (around their group's mean) that lies within states;
- singletons: the share of steps in a state visited once, whose action is compared with no other;
- error: leave one episode of a group out and predict the returns of its steps from the others', by the mean of the
  state, or of the group for a state that no other episode visited; the mean squared error.

Writes and prints the command, the machine, every value and, seed by seed, the differences.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from g2po_envs.alfworld import AlfworldEnvironment, Manifest
from g2po_envs.alfworld.environment import KEYS
from g2po_envs.alfworld.tiny import tiny_environment
from g2po_trl import StateGraph, Trajectory
from g2po_trl.report.analysis import load_iterations

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "train_alfworld.py"
GAMMA = 0.95


def run(key: str, seed: int, output: Path, threads: int) -> Path:
    """The folder of one run, which is played or continued unless it is complete."""
    folder = output / "runs" / f"{key}-seed{seed}"
    done = folder / "done.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(RECIPE), "--key", key, "--seed", str(seed), "--output_dir", str(folder)]
        command += ["--resume_from_checkpoint", "auto"]
        print("$ python", *command, flush=True)
        started = time.time()
        with (folder / "log.txt").open("a") as log:
            subprocess.run(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        done.write_text(json.dumps({"seconds": round(time.time() - started, 1)}))
    return folder


def replayed(trajectory: Trajectory, environment: AlfworldEnvironment) -> Trajectory:
    """The same episode with the keys that this environment gives its states."""
    steps, observation = [], environment.reset(task_id=trajectory.task_id)
    for step in trajectory.steps:
        if observation.text != step.observation:
            raise ValueError(f"the replay of {trajectory.task_id} left its way at {observation.text!r}")
        steps.append(type(step)(step.observation, step.action, step.valid, observation.state_key))
        observation = environment.step(step.action).observation
    return Trajectory(trajectory.task_id, steps, trajectory.reward, trajectory.outcome)


def measure(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Sums over the steps of an iteration: `SUMS`, each a square or a number of steps."""
    graph = StateGraph.from_groups(groups, gamma=GAMMA)
    of, seen = graph.counted, {}
    returns, node, group, episode = (a[of] for a in (graph.returns, graph.node, graph.group, graph.trajectory))
    group_mean = np.bincount(group, returns) / np.maximum(np.bincount(group), 1)

    def without_its_episode(place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum and number of the returns at a step's place (node or group), but for those of its own episode."""
        _, own = np.unique(np.column_stack([place, episode]), axis=0, return_inverse=True)
        sums = np.bincount(place, returns)[place] - np.bincount(own, returns)[own]
        return sums, np.bincount(place)[place] - np.bincount(own)[own]

    (sums, numbers), (all_sums, all_numbers) = without_its_episode(node), without_its_episode(group)
    judged = all_numbers > 0
    known = numbers > 0
    predicted = np.where(known, sums / np.maximum(numbers, 1), all_sums / np.maximum(all_numbers, 1))
    error = (predicted - returns) ** 2
    seen["steps"] = len(returns)
    seen["within"] = float(((returns - graph.values[of]) ** 2).sum())
    seen["total"] = float(((returns - group_mean[group]) ** 2).sum())
    seen["singletons"] = int((graph.node_visits == 1).sum())
    seen["judged"], seen["error"] = int(judged.sum()), float(error[judged].sum())
    seen["known"], seen["error_known"] = int(known.sum()), float(error[known].sum())
    return seen


def summed(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Shares and mean errors of some iterations."""
    sums = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        "within": sums["within"] / sums["total"],
        "singletons": sums["singletons"] / sums["steps"],
        "error": sums["error"] / sums["judged"],
        "known": sums["known"] / sums["steps"],
        "error_known": sums["error_known"] / sums["known"],
    }


def measured(folder: Path, games: Manifest, environment_of: Callable[..., AlfworldEnvironment]) -> dict:
    """One run: its success, and what each key makes of its training episodes."""
    environments = {key: environment_of(games, key=key) for key in KEYS}
    rows: dict[str, list[dict[str, float]]] = {key: [] for key in KEYS}
    for iteration in load_iterations(folder):
        for key, environment in environments.items():
            rows[key].append(measure([[replayed(t, environment) for t in group] for group in iteration.groups]))
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    success = [entry["episode/success_rate"] for entry in history if "episode/success_rate" in entry]
    return {
        "held_out_before": 100 * evaluations[0]["success_rate"],
        "held_out": 100 * evaluations[-1]["success_rate"],
        "training": 100 * mean(success),
        "training_success": [round(value, 4) for value in success],
        "keys": {
            key: {**summed(of), "first 10": summed(of[:10]), "last 10": summed(of[-10:]), "iterations": of}
            for key, of in rows.items()
        },
        **json.loads((folder / "done.json").read_text()),
    }


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± sample standard deviation, and the values."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation} ({', '.join(f'{value:.{digits}f}' for value in values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--keys", nargs="+", default=list(KEYS), choices=KEYS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of a run")
    parser.add_argument("--games", type=Path, default=Path("~/.cache/g2po_trl/alfworld-tiny-0/train-320").expanduser())
    args = parser.parse_args()
    jobs = [(key, seed) for seed in args.seeds for key in args.keys]
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = list(pool.map(lambda job: run(*job, args.output, args.threads), jobs))

    games = Manifest.scan(args.games)
    runs = []
    for (key, seed), folder in zip(jobs, folders):
        runs.append({"key": key, "seed": seed, **measured(folder, games, tiny_environment)})
        print(f"{key} seed {seed}: held-out {runs[-1]['held_out']:.1f} %, training {runs[-1]['training']:.1f} %")
    facts = {
        "command": " ".join(["python benchmarks/keys.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "alfworld")},
        "threads": args.threads,
        "gamma": GAMMA,
        "runs": runs,
    }
    (args.output / "results.json").write_text(json.dumps(facts) + "\n")

    for key in args.keys:
        of = [r for r in runs if r["key"] == key]
        for name in ("held_out", "training"):
            print(f"{key}: {name} {spread([r[name] for r in of], 1)}")
    for name in ("within", "singletons", "error", "known", "error_known"):
        for key in KEYS:
            print(f"{name} by {key}, all runs: {spread([r['keys'][key][name] for r in runs], 4)}")
        gains = [r["keys"]["memory"][name] - r["keys"]["released"][name] for r in runs]
        print(f"{name}, memory - released on the same episodes: {spread(gains, 4)}")
    of = {(r["key"], r["seed"]): r for r in runs}
    for name in ("held_out", "training"):
        pairs = [of["memory", s][name] - of["released", s][name] for s in args.seeds if len(args.keys) == 2]
        if pairs:
            print(f"{name}, memory - released by seed: {spread(pairs, 1)}")


if __name__ == "__main__":
    main()
