"""ALFWorld by window and by conversation: success, prompt tokens, prefix-cache hits, and the update's cost.

    python -m benchmarks.learning.history teach              # STARTS: one model, taught the same walks both ways
    python -m benchmarks.learning.history train              # G2PO from it, both ways, seeds 0 and 1, one at a time
    python -m benchmarks.learning.history cost               # seconds and positions, in turns, in one process
    .venv-vllm/bin/python -m benchmarks.learning.history cache      # hits of vLLM's prefix cache
    python -m benchmarks.learning.history report             # the table

*teach*: the bundled model, with room for 4,096 tokens, goes on with its own course (`history_teaching.py`), with
prompts of the one form or the other. Success of a start, before and after, is on games of the recipe's seed.
*train*: `recipes/train_alfworld.py` as it is, but for `--history`, and room for the whole conversation. A complete run
is a file in RESULTS; one that was interrupted goes on. *cost*: rollouts and updates of both starts, in turns. *cache*:
some iterations of the recipe with `--use_vllm true`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, facts, write_results
from benchmarks.learning.history_teaching import (
    HISTORIES,
    MAX_TURNS,
    Course,
    demonstrations_on,
    load_start,
    make_actor,
    teach,
    walks_of,
)
from g2po_envs.alfworld.games import generate_games
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.tiny import tiny_environment
from g2po_envs.tiny.demonstration import load, save
from g2po_trl import EnvironmentPool, Player, Sampling, TransformersEngine

CACHE = Path("~/.cache/g2po_trl").expanduser()


def games_of(split: str, number: int, seed: int) -> Manifest:
    """Return generated games of the default recipe's size."""
    folder = CACHE / f"alfworld-tiny-{seed}" / f"{split}-{number}"
    generate_games(folder, split, number, seed=seed, size="tiny")
    return Manifest.scan(folder)


def examine(model: torch.nn.Module, tokenizer: Any, history: str, games: Manifest, number: int) -> dict[str, float]:
    """Return success of a start at temperature 1.0 on some games, one episode each, and what it read."""
    torch.manual_seed(0)
    actor = make_actor(tokenizer, history)
    actor.engine = TransformersEngine.from_model(model, tokenizer)
    with EnvironmentPool(partial(tiny_environment, games), num_workers=1) as pool:
        rows = games.rows()[:number]
        played, stats = Player(pool, actor, MAX_TURNS).play(rows, Sampling(1.0, max_tokens=24))
    steps = [step for trajectory in played for step in trajectory.steps]
    return {
        "episodes": len(played),
        "success": sum(trajectory.success for trajectory in played) / len(played),
        "well formed": sum(step.valid for step in steps) / len(steps),
        "admissible": sum(step.action in step.admissible_actions for step in steps) / len(steps),
        "prompt tokens": stats.prompt_tokens / stats.num_steps,
        "seconds": round(stats.total_time, 1),
    }


def run_teach(args: argparse.Namespace) -> None:
    """Teach the start in each form and examine it before and after."""
    path = args.work / f"demonstrations-{args.games}.jsonl"
    if not path.is_file():
        args.work.mkdir(parents=True, exist_ok=True)
        save(path, demonstrations_on(games_of("train", args.games, 1000), 1, 1000))
    walks = walks_of(load(path))
    shown = games_of("train", 320, 0)
    course = Course(walks, args.steps, learning_rate=args.learning_rate)
    for history in args.histories:
        model, tokenizer = load_start()
        before = examine(model, tokenizer, history, shown, args.examined)
        print(history, "before", before, flush=True)
        taught = teach(course, model, tokenizer, history)
        folder = args.work / f"start-{history}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        after = examine(model, tokenizer, history, shown, args.examined)
        print(history, "after", after, flush=True)
        found = {"walks": len(walks), "taught": taught, "before": before, "after": after}
        write_results(args.results, {**facts("torch", "trl", seed=course.seed), **found}, f"start-{history}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["teach"])
    parser.add_argument("--histories", nargs="+", choices=HISTORIES, default=list(HISTORIES))
    parser.add_argument("--results", type=Path, default=RESULTS / "history", help="small files")
    parser.add_argument("--work", type=Path, default=CACHE / "history", help="folders of starts and runs")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of teaching, of 8 walks each")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of teaching")
    parser.add_argument("--games", type=int, default=400, help="games of the walks, one each")
    parser.add_argument("--examined", type=int, default=128, help="games that examine a start")
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"teach": run_teach}[args.part](args)


if __name__ == "__main__":
    main()
