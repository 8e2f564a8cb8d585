"""ALFWorld by window and by conversation: success, prompt tokens, prefix-cache hits, and the update's cost.

    python -m benchmarks.learning.history teach              # STARTS: one model, taught the same walks both ways
    .venv-vllm/bin/python -m benchmarks.learning.history train      # G2PO from it, both ways, seeds 0 and 1
    python -m benchmarks.learning.history cost               # seconds and positions, in turns, in one process
    python -m benchmarks.learning.history report             # the table

*teach*: the bundled model, with room for 4,096 tokens, goes on with its own course (`history_teaching.py`), with
prompts of the one form or the other; the bundled model as it is (`--steps 0`) was taught by window already. *train*:
`recipes/train_alfworld.py` as it is, but for `--history`, the start and room for the whole conversation, with vLLM;
flags after `--` are the recipe's. An interrupted run goes on; RESULTS has what there is of it. *cost*: updates on
rollouts of the runs of the first seed, in turns.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
from pathlib import Path

import torch

from benchmarks.common import RESULTS, facts, write_results
from benchmarks.learning.history_cost import cost
from benchmarks.learning.history_report import report
from benchmarks.learning.history_runs import VLLM, keep_unfinished, train
from benchmarks.learning.history_teaching import HISTORIES, Course, demonstrations_on, load_start, teach, walks_of
from benchmarks.learning.recipe_runs import RecipeRunner
from g2po_envs.alfworld.games import generate_games
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.tiny.demonstration import load, save

CACHE = Path("~/.cache/g2po_trl").expanduser()


def games_of(split: str, number: int, seed: int) -> Manifest:
    """Return generated games of the default recipe's size."""
    folder = CACHE / f"alfworld-tiny-{seed}" / f"{split}-{number}"
    generate_games(folder, split, number, seed=seed, size="tiny")
    return Manifest.scan(folder)


def run_teach(args: argparse.Namespace) -> None:
    """Teach the start in each form."""
    path = args.work / f"demonstrations-{args.games}.jsonl"
    if not path.is_file():
        args.work.mkdir(parents=True, exist_ok=True)
        save(path, demonstrations_on(games_of("train", args.games, 1000), 1, 1000))
    walks = walks_of(load(path))
    course = Course(walks, args.steps, args.walks_per_step, args.learning_rate, args.course_seed)
    for history in args.histories:
        folder, path = args.work / f"start-{history}", args.results / f"start-{history}.json"
        model, tokenizer = load_start(str(folder) if args.more else None)
        courses = json.loads(path.read_text())["courses"] if args.more else []
        courses.append(teach(course, model, tokenizer, history))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found = {"history": history, "walks": len(walks), "turns": sum(map(len, walks)), "courses": courses}
        write_results(args.results, {**facts("torch", "trl"), **found}, path.name)


def run_train(args: argparse.Namespace) -> None:
    """Play the runs that are missing, seed by seed."""
    for name, value in VLLM.items():
        os.environ.setdefault(name, value)
    runner = RecipeRunner()
    runner.stop_on_signals()
    for seed in args.seeds:
        for history in args.histories:
            if not train(runner, args.work, args.results, history, seed, args.iterations, args.flags):
                return


def run_cost(args: argparse.Namespace) -> None:
    """Measure updates on a rollout of each run of the first seed, in turns."""
    for rollout in args.rollouts:
        name = f"trajectories/train-{rollout:06d}.jsonl"
        recorded = {history: args.work / f"{history}-seed{args.seeds[0]}" / name for history in args.histories}
        found = cost(recorded, (None, 256), args.repetitions)
        write_results(args.results, {"rollout": rollout, **found}, f"cost-{rollout}.json")
        print(found["counts"], found["medians"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["teach", "train", "cost", "report"])
    parser.add_argument("--histories", nargs="+", choices=HISTORIES, default=list(HISTORIES))
    parser.add_argument("--results", type=Path, default=RESULTS / "history", help="small files")
    parser.add_argument("--work", type=Path, default=CACHE / "history", help="folders of starts and runs")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of teaching")
    parser.add_argument("--walks_per_step", type=int, default=8, help="walks of an optimizer step of teaching")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of teaching")
    parser.add_argument("--more", action="store_true", help="go on teaching the starts that are there")
    parser.add_argument("--course_seed", type=int, default=0, help="of the order of the walks, and of their variation")
    parser.add_argument("--games", type=int, default=400, help="games of the walks, one each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="SEED")
    parser.add_argument("--iterations", type=int, default=40, help="of a run")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1], help="rollouts whose updates are measured")
    parser.add_argument("--repetitions", type=int, default=3, help="of each measured update")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: more of the recipe's")
    args = parser.parse_args()
    args.results, args.work = args.results.expanduser().absolute(), args.work.expanduser().absolute()
    torch.set_num_threads(1)
    parts = {"teach": run_teach, "train": run_train, "cost": run_cost, "report": lambda args: None}
    parts[args.part](args)
    if args.part in ("cost", "report"):
        keep_unfinished(args.work, args.results, args.histories, args.seeds)
        print(report(args.results))


if __name__ == "__main__":
    main()
