"""A pretrained language model learns to act: SmolLM2-135M on ALFWorld by G2PO and by GRPO, from one taught start.

    python -m benchmarks.learning.pretrained --jobs 2 [--methods g2po grpo] [--seeds 0 1] [--minutes 300] [--vllm] …
    python -m benchmarks.learning.pretrained --official FOLDER [--vllm]
    python -m benchmarks.learning.pretrained --report

1. *start*: `recipes/teach_alfworld.py` teaches the model the completion's format (seed 0).
2. *runs*: `recipes/train_alfworld.py --config benchmarks/learning/smollm2.yaml` from that start, one thread each,
   with the method's flags, and FLAGS. A panel of 96 held-out games is played before, midway and after. `--vllm`:
   episodes are played by vLLM (with `.venv-vllm/bin/python`, which `make test-vllm` sets up).
3. *official* (with `--official`): `g2po evaluate` of the start and of the run that ended best on the panel, on
   official games (FOLDER: `json_2.1.1/valid_seen`). Asked and sampled as in training, but with 30 turns.

A complete run is one small file, RESULTS/METHOD-seedN.json, and is not run again. What is interrupted, by Ctrl-C,
SIGTERM or a power cut, goes on from its last iteration when the same command is given again. At the end, and with
`--report`: RESULTS/table.md, learning curves and held-out success of what is there (`pretrained_report.py`).
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import machine
from benchmarks.learning.pretrained_report import report, runs_of
from benchmarks.learning.recipe_runs import ROOT, Busy, RecipeRunner, code, say
from g2po_trl import read_jsonl
from g2po_trl.utils.json import write_json

METHODS = {
    "g2po": [],
    "grpo": ["--advantage_estimator", "grpo"],
    "g2po lambda 0.5": ["--value_lambda", "0.5"],
}
TEACH = ["recipes/teach_alfworld.py", "--disable_tqdm", "true"]
TRAIN = ["recipes/train_alfworld.py", "--config", "benchmarks/learning/smollm2.yaml"]
PANEL = ["--num_eval_games", "96", "--eval_strategy", "steps", "--num_environment_workers", "1"]
# For vLLM's CPU build; several runs at once must not be bound to the same core.
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Official rooms have more objects than generated ones: longer prompts, longer ways.
OFFICIAL = ["--max-turns", "30", "--max-prompt-length", "2048", "--temperature", "1.0", "--seeds", "2"]
PARTS = ("g2po_trl", "envs", "recipes")
UPDATE = ("left_out_fraction", "repeated_token_fraction")  # rows without an advantage; 0: padded, not shared
PHASES = ("rollout", "advantage", "batch", "logps", "update")


@dataclass
class Runner(RecipeRunner):
    """The start, and the runs from it."""

    results: Path
    work: Path
    steps: int
    vllm: bool = False
    flags: Sequence[str] = ()
    start_sha256: str = ""  # of its weights

    def start(self) -> Path | None:
        """The taught model; made if it is not there. `None`: stopped before its end.

        Raises:
            ValueError: when results are of another one.
        """
        folder, (commit, _) = self.work / "start", code(PARTS)
        if not (folder / "teaching.json").is_file() and self.run(folder, TEACH, commit) is None:
            return None
        with (folder / "model.safetensors").open("rb") as file:
            self.start_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        path = self.results / "start.json"
        other = json.loads(path.read_text())["sha256"] if path.is_file() else self.start_sha256
        if other != self.start_sha256:
            raise ValueError(f"{path} is of another start, {other[:12]}…, than {folder}: choose another --results")
        about = {"command": TEACH, "sha256": self.start_sha256}
        about |= json.loads((folder / "teaching.json").read_text())
        attempts = folder / "attempts.json"  # not of a start that was taught elsewhere
        about |= {"attempts": json.loads(attempts.read_text())} if attempts.is_file() else {}
        write_json(path, about, indent=1)
        return folder

    def command(self, method: str, seed: int, start: str = "START") -> list[str]:
        """The recipe and its flags; `start` is the taught model's folder."""
        flags = ["--model_name_or_path", start, "--seed", str(seed), "--max_steps", str(self.steps)]
        flags += ["--use_vllm", "true"] if self.vllm else []
        flags += [*METHODS[method], *self.flags]
        return [*TRAIN, *PANEL, "--eval_steps", str(math.ceil(self.steps / 2)), *flags]

    def is_complete(self, method: str, seed: int) -> bool:
        """Whether this run's file is there.

        Raises:
            ValueError: when it is there, complete or under way, by another command.
        """
        done, begun = (
            self.results / f"{name_of(method, seed)}.json",
            self.work / name_of(method, seed) / "command.json",
        )
        for path, remedy in ((done, "choose another --results"), (begun, "choose another --work")):
            other = path.is_file() and json.loads(path.read_text())["command"]
            if other and other != self.command(method, seed):
                raise ValueError(f"{path} is of another command, {' '.join(other)}: {remedy}")
        return done.is_file()

    def play(self, method: str, seed: int) -> bool:
        """Play or continue a run, and write its file. False: stopped before its end."""
        folder, (commit, _) = self.work / name_of(method, seed), code(PARTS)
        about = {"method": method, "seed": seed, "command": self.command(method, seed)}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "command.json", about)
        attempts = self.run(folder, self.command(method, seed, str(self.work / "start")), commit)
        if attempts is None:
            return False
        path = self.results / f"{name_of(method, seed)}.json"
        write_json(path, {**about, "start": self.start_sha256, **collected(folder), "attempts": attempts})
        return True

    def official(self, games: Path) -> None:
        """Evaluate the start and the best model on official games.

        What is interrupted is resumed, and its seconds are then not known: evaluations do not keep them.

        Raises:
            ValueError: when there is no complete run.
        """
        (commit, _), runs = code(PARTS), runs_of(self.results)
        if not runs:
            raise ValueError(f"results is {str(self.results)!r}, where no run is complete: train first")
        best = max(runs, key=lambda run: run["panel"][-1]["success_rate"] or 0.0)
        run = name_of(best["method"], best["seed"])
        for role, model in (("start", "start"), ("best", run)):
            output, path = self.work / "official" / model, self.results / f"official-{role}.json"
            words = ["-m", "g2po_trl", "evaluate", "--model", str(self.work / model), "--run", str(self.work / run)]
            words += ["--panel", str(games), *OFFICIAL, "--output", str(output)]
            words += ["--engine", "vllm"] if self.vllm else []
            command = " ".join(["python", *words]).replace(str(games), "VALID_SEEN").replace(str(self.work), "WORK")
            if path.is_file() and json.loads(path.read_text())["command"] == command:
                say(f"{path.name} is there")
                continue
            resumed, started = (output / "trajectories").exists(), time.time()
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
            kept = {"model": model, "command": command, "commit": commit}
            kept["seconds"] = None if resumed else round(time.time() - started, 1)
            played = json.loads((output / "results.json").read_text())
            kept |= {"games": int(played["settings"]["tasks"].split()[0]), "seeds": played["seeds"]}
            kept["won"] = [won(path) for path in sorted((output / "trajectories").glob("*.jsonl"))]
            write_json(path, kept, indent=1)


def name_of(method: str, seed: int) -> str:
    return f"{method.replace(' ', '-')}-seed{seed}"


def won(trajectories: Path) -> str:
    """By task, in their order: 1 if its trajectory in this file is a success, else 0."""
    return "".join(str(int(t.success)) for t in sorted(read_jsonl(trajectories), key=lambda t: t.task_id))


def collected(folder: Path) -> dict:
    """What is kept of a run, complete or under way."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(states[-1].read_text())["log_history"] if states else []
    iterations = [entry for entry in history if "episode/success_rate" in entry]
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    kept = ("step", "episodes", "success_rate", "success_rate_by_type", "turns", "valid_action_ratio", "error_rate")

    def panel(entry: dict) -> dict:
        played = folder / "trajectories" / f"eval-{entry['step']:06d}.jsonl"
        return {**{name: entry[name] for name in kept}, "won": won(played)}

    def curve(metric: str) -> list[float | None]:
        return [entry.get(metric) and float(f"{entry[metric]:.5g}") for entry in iterations]

    return {
        "training": {
            **{name: curve(f"episode/{name}") for name in ("success_rate", "turns", "valid_action_ratio")},
            **{f"time/{name}": curve(f"time/{name}") for name in PHASES},
            **{f"update/{name}": curve(f"update/{name}") for name in UPDATE},
            "grad_norm": curve("grad_norm"),
        },
        "panel": [panel(entry) for entry in evaluations],
        "versions": json.loads((folder / "run.json").read_text())["versions"],
        "machine": machine(),
    }


def run_all(args: argparse.Namespace) -> int:
    """Play what is missing; the number of runs that failed."""
    runner, begun, failed = Runner(args.results, args.work, args.steps, args.vllm, args.flags), time.time(), []
    runner.stop_on_signals()
    jobs = [(method, seed) for seed in args.seeds for method in args.methods]
    jobs = [job for job in jobs if not runner.is_complete(*job)]
    choosing = threading.Lock()

    def worker() -> None:
        while True:
            with choosing:
                late = args.minutes and time.time() - begun > 60 * args.minutes
                if not jobs or late or runner.stopping.is_set():
                    return
                job = jobs.pop(0)
            say(f"{job[0]}, seed {job[1]}")
            try:
                runner.play(*job)
            except (Busy, RuntimeError, OSError, ValueError) as error:
                failed.append(job)
                say(f"FAILED: {error or 'another process is at it'}")

    try:
        if runner.side_by_side(runner.start, 1) == [None]:
            return 0
    except (Busy, RuntimeError) as error:
        say(f"FAILED: {error or 'another process teaches the start'}")
        return 1
    runner.side_by_side(worker, args.jobs)
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/pretrained", help="small files")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/g2po_trl/pretrained"), help="folders of runs")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["g2po", "grpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="SEED")
    parser.add_argument("--steps", type=int, default=25, help="iterations of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--vllm", action="store_true", help="rollouts by vLLM")
    parser.add_argument("--official", type=Path, metavar="FOLDER", help="of official games, for start and best model")
    parser.add_argument("--report", action="store_true", help="play nothing: write the table of what is there")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: more of the recipe's")
    args = parser.parse_args()
    args.results, args.work = args.results.expanduser().absolute(), args.work.expanduser().absolute()
    for name, value in VLLM.items() if args.vllm else ():
        os.environ.setdefault(name, value)
    args.results.mkdir(parents=True, exist_ok=True)
    failed = 0
    try:
        if args.official:
            Runner(args.results, args.work, args.steps, args.vllm).official(args.official.expanduser().absolute())
        elif not args.report:
            failed = run_all(args)
    except ValueError as error:
        parser.error(str(error))
    print(report(args.results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
