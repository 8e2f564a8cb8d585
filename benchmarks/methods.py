"""A comparison of methods with a language model, large enough to tell them apart.

    python benchmarks/methods.py --jobs 2 [--minutes 300] [--settings short long] [--methods g2po …] [--seeds 0 1 …]
    python benchmarks/methods.py --report

Two settings, from the same starting model: *short*, the default recipe, and *long* (recipes/alfworld/tiny-long.yaml:
larger rooms, 30 turns, a start that wins about one game in ten). Each run is a recipe that a user runs, on one thread,
with `--seed`, the method's flags and 576 held-out games. Seeds 0 to 3 for every method; then 4 to 7 for GRPO, G2PO and
all methods within 4 points of the best. *long* takes the better key and the best rival from *short*, when that has its
first four seeds. `--seeds` and `--methods` together play what they name, whatever the rules say.

A complete run is one small file, RESULTS/runs/SETTING/METHOD-seedN.json, and is not run again. What is interrupted, by
Ctrl-C, SIGTERM or a power cut, goes on from its last iteration when the same command is given again. Checkpoints and
trajectories are in WORK. At the end, and with `--report`: RESULTS/table.md and learning curves, of what is there.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml
from methods_report import (
    REFERENCE,
    START,
    Runs,
    methods_of,
    plan,
    second_stage,
    stage_complete,
    table,
    table_with_one_spread,
)
from recipe_runs import ROOT, Busy, RecipeRunner, code, say

from g2po_trl import read_jsonl
from g2po_trl.json_text import write_json

CONFIGS = {"short": "recipes/alfworld/tiny.yaml", "long": "recipes/alfworld/tiny-long.yaml"}
RECIPE = "recipes/train_alfworld.py"
COMMON = ["--num_eval_games", "576", "--eval_before", "false", "--save_total_limit", "1", "--report_to", "none"]
COMMON += ["--num_environment_workers", "1"]
ESTIMATOR, KEY, LAMBDA = "--advantage_estimator", ["--key", "memory"], "--value_lambda"
METHODS: dict[str, list[str]] = {
    "ppo": [],
    "rloo": [ESTIMATOR, "rloo"],
    "grpo": [ESTIMATOR, "grpo"],
    "gigpo": [ESTIMATOR, "gigpo"],
    "hgpo": [ESTIMATOR, "hgpo"],
    "graphgpo": [ESTIMATOR, "graphgpo"],
    "crbc": [ESTIMATOR, "crbc"],
    "g2po": [],
    "g2po without A_NC": ["--use_node_advantage", "false"],
    "g2po without A_EC": ["--use_edge_advantage", "false"],
    "g2po without aggregation": ["--use_group_aggregation", "false"],
    "g2po lambda 0.5": [LAMBDA, "0.5"],
    "g2po lambda 0": [LAMBDA, "0"],
    "g2po lambda auto": [LAMBDA, "auto"],
    "g2po memory": KEY,
    "g2po memory lambda 0.5": [*KEY, LAMBDA, "0.5"],
    "g2po memory lambda auto": [*KEY, LAMBDA, "auto"],  # in long alone, where memory is the better key
    START: ["--learning_rate", "0", "--max_steps", "1"],  # what every run starts from, on the same held-out games
}
ALL = [method for method in METHODS if method != START]
VARIANTS = [method for method in ALL if method.startswith(f"{REFERENCE} ")]
SHORT = [method for method in ALL if method != "g2po memory lambda auto"]
TYPES = {
    "pick_and_place_simple": "Pick",
    "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean",
    "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool",
    "pick_two_obj_and_place": "Pick2",
}
VERSIONS = ("torch", "transformers", "trl", "accelerate", "numpy", "alfworld", "textworld")
PARTS = ("g2po_trl", "envs", "recipes/train_alfworld.py", "recipes/train_alfworld_ppo.py")
RELEVANT = ("torch", "transformers", "trl", "alfworld")  # a run with others is not the same run
CURVES = {
    "success": "episode/success_rate",
    "turns": "episode/turns",
    "valid": "episode/valid_action_ratio",
    "group_size": "graph/mean_group_size",
    "singleton_steps": "graph/singleton_step_fraction",
    "value_std_within_node": "graph/value_std_within_node",
    "value_lambda": "graph/value_lambda",
    "kl": "kl",
    "grad_norm": "grad_norm",
}
ABOUT = """Success in percent, mean ± standard deviation over seeds. "Minus g2po": paired by seed, with the 95 %
bootstrap interval over seeds; told apart where it and Student's interval leave out 0. The comparisons are not
corrected for their number. Held-out: 576 games, one episode each, after training."""


@dataclass
class Runner(RecipeRunner):
    """Plays runs of this benchmark.

    Args:
        results, work: folders of small files, and of runs.
    """

    results: Path
    work: Path

    def play(self, setting: str, method: str, seed: int) -> bool:
        """Play or continue a run, and write its file. False: stopped before its end.

        Raises:
            Busy: when another process is at it.
            RuntimeError: when the recipe failed; names its log.
        """
        command, config = command_of(setting, method, seed)
        commit, trees = code(PARTS)
        folder = self.work / setting / f"{name_of(method, seed)}-{fingerprint(command, config, trees)}"
        attempts = self.run(folder, command, commit)
        if attempts is None:
            return False
        run = {"setting": setting, "method": method, "seed": seed, "command": command, "config": config}
        write_json(file_of(self.results, setting, method, seed), run | collected(folder, attempts))
        return True


def command_of(setting: str, method: str, seed: int) -> tuple[list[str], str]:
    """What is run, but for the folder, and a hash of the values of its YAML file."""
    recipe, config = RECIPE, CONFIGS[setting]
    if method == "ppo":
        recipe, config = recipe.replace(".py", "_ppo.py"), config.replace(".yaml", "-ppo.yaml")
    command = [recipe, "--config", config, "--seed", str(seed), *COMMON, *METHODS[method]]
    values = json.dumps(yaml.safe_load((ROOT / config).read_text()), sort_keys=True)
    return command, hashlib.sha256(values.encode()).hexdigest()[:12]


def fingerprint(command: list[str], config: str, trees: str) -> str:
    relevant = [version(package) for package in RELEVANT]
    return hashlib.sha256(json.dumps([command, config, relevant, trees]).encode()).hexdigest()[:8]


def name_of(method: str, seed: int) -> str:
    return f"{method.replace(' ', '-')}-seed{seed}"


def file_of(results: Path, setting: str, method: str, seed: int) -> Path:
    return results / "runs" / setting / f"{name_of(method, seed)}.json"


def collected(folder: Path, attempts: list[dict]) -> dict:
    """What is kept of a complete run."""
    settings = json.loads((folder / "run.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    after = [json.loads(line) for line in (folder / "evaluations.jsonl").open()][-1]
    iterations = [entry for entry in history if "episode/success_rate" in entry]
    curves = {name: [entry.get(metric) for entry in iterations] for name, metric in CURVES.items()}
    played = read_jsonl(folder / "trajectories" / f"eval-{after['step']:06d}.jsonl")
    kept = ("panel", "episodes", "success_rate", "success_rate_by_type", "episodes_by_type", "turns")
    kept += ("turns_to_success", "valid_action_ratio", "error_rate", "lost_rate")
    return {
        "commit": attempts[-1]["commit"],
        "versions": {package: version(package) for package in VERSIONS},
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "seconds": round(sum(attempt["seconds"] for attempt in attempts), 1),
        "cpu_seconds": round(sum(attempt["cpu_seconds"] for attempt in attempts), 1),
        "attempts": attempts,
        "iteration_seconds": [
            round(
                sum(entry.get(f"time/{part}", 0) for part in ("rollout", "advantage", "batch", "logps", "update")), 2
            )
            for entry in iterations
        ],
        "train_games": settings["train_manifest"],
        "training": {
            name: [None if value is None else float(f"{value:.5g}") for value in curve]
            for name, curve in curves.items()
            if any(value is not None for value in curve)
        },
        "held_out": {
            **{name: after[name] for name in kept},
            # One letter a game, in the manifest's order: won, lost, or an error of the environment.
            "won": "".join("1" if t.success else "0" if t.counted else "e" for t in played),
        },
        "analysis": {},
    }


def load(results: Path) -> Runs:
    """Every complete run, by (setting, method, seed)."""
    runs = [json.loads(path.read_text()) for path in sorted((results / "runs").glob("*/*.json"))]
    return {(run["setting"], run["method"], run["seed"]): run for run in runs}


def differs(run: dict) -> str | None:
    """Why a complete run is not the one that would be played now."""
    command, config = command_of(run["setting"], run["method"], run["seed"])
    if run["command"] != command:
        return f"its command is {' '.join(run['command'])}"
    if run["config"] != config:
        return f"the values of {command[2]} have changed"
    for package in RELEVANT:
        if run["versions"][package] != version(package):
            return f"{package} {run['versions'][package]}, here {version(package)}"
    return None


def report(results: Path) -> str:
    """Write table.md and the curves of what is there."""
    from g2po_trl.report import plots

    runs = load(results)
    parts = [ABOUT]
    for setting in CONFIGS:
        of = {key: run for key, run in runs.items() if key[0] == setting}
        trained = {key: run for key, run in of.items() if key[1] != START}
        if not of:
            continue
        parts.append(f"## {setting}\n\n" + "\n".join(table(runs, setting, [START, *ALL], TYPES)))
        if not trained:
            parts.append("No run yet.")
            continue
        if together := table_with_one_spread(runs, setting, ALL):
            parts.append("\n".join(together))
        known = methods_of(runs, setting, SHORT)
        missing = [f"{m} {seed}" for _, m, seed in plan(runs, [setting], SHORT) if (setting, m, seed) not in runs]
        chosen = second_stage(runs, setting, known)
        stage = "" if stage_complete(runs, setting, known) else "Seeds 0 to 3 are not complete. "
        stage += f"Seeds 4 to 7: {', '.join(chosen)}. " if chosen else ""
        stage += f"Still to be played: {', '.join(missing)}." if missing else "Complete."
        commits = ", ".join(sorted({run["commit"][:10] for run in trained.values()}))
        hours = sum(run["seconds"] for run in trained.values()) / 3600
        parts.append(f"{stage}\n\n{len(trained)} runs, {hours:.1f} hours, commits {commits}.")
        curves = {m: [run["training"]["success"] for key, run in sorted(trained.items()) if key[1] == m] for m in ALL}
        for name, shown in (("", METHODS.keys() - VARIANTS), ("-g2po", {REFERENCE, *VARIANTS})):
            made = plots.learning_curves(
                {m: seeds for m, seeds in curves.items() if seeds and m in shown},
                ylabel="success of training episodes, mean of 5 iterations (%)",
                bold=REFERENCE,
            )
            plots.save(made, results, f"curves-{setting}{name}")
    text = "\n\n".join(parts) + "\n"
    results.mkdir(parents=True, exist_ok=True)
    (results / "table.md").write_text(text)
    return text


def run_all(args: argparse.Namespace) -> int:
    """Play what is missing; the number of runs that failed."""
    runner, begun = Runner(args.results, args.work), time.time()
    taken: set[tuple[str, str, int]] = set()
    failed: dict[tuple[str, str], str] = {}
    choosing = threading.Lock()
    runner.stop_on_signals()

    def next_job() -> tuple[str, str, int] | None:
        """The first that is not complete, under way or of a method that failed. What stages ask for is seen anew."""
        with choosing:
            if runner.stopping.is_set() or (args.minutes and time.time() - begun > 60 * args.minutes):
                return None
            runs = load(args.results)
            jobs = [(setting, START, 0) for setting in args.settings]
            jobs += plan(runs, args.settings, SHORT, args.methods, args.seeds)
            for job in jobs:
                if job not in runs and job not in taken and job[:2] not in failed:
                    taken.add(job)
                    return job
            return None

    def worker() -> None:
        while job := next_job():
            setting, method, seed = job
            say(f"{setting}, {method}, seed {seed}")
            try:
                if runner.play(*job):
                    run = json.loads(file_of(args.results, *job).read_text())
                    say(
                        f"{setting}, {method}, seed {seed}: training "
                        f"{100 * sum(run['training']['success']) / len(run['training']['success']):.1f}, held-out "
                        f"{100 * run['held_out']['success_rate']:.1f} %, {run['seconds']:.0f} s"
                    )
            except Busy:
                say(f"{setting}, {method}, seed {seed}: another process is at it")
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                # Its flags may not exist yet: its other seeds would fail as well.
                failed[setting, method] = str(error)
                say(f"FAILED: {error}")

    for run in load(args.results).values():
        if reason := differs(run):
            say(
                f"kept, though now it would be another run: {run['setting']}, {run['method']}, seed {run['seed']}: "
                f"{reason}. Delete its file to play it again."
            )
    runner.side_by_side(worker, args.jobs)
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/methods", help="small files")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/g2po_trl/methods"), help="folders of runs")
    parser.add_argument("--settings", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--methods", nargs="+", choices=ALL)
    parser.add_argument("--seeds", type=int, nargs="+", choices=range(8), metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--report", action="store_true", help="play nothing: write the table of what is there")
    args = parser.parse_args()
    args.results, args.work = args.results.expanduser().absolute(), args.work.expanduser().absolute()
    failed = 0 if args.report else run_all(args)
    print(report(args.results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
