"""The two commands of a tiny model: train it and evaluate it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer

from g2po_envs.tiny.demonstration import Demonstration, load, save
from g2po_envs.tiny.evaluation import play, summarize
from g2po_envs.tiny.training import Course, Recipe, teach
from g2po_trl.environments.contract import TextEnvironment


def make_model(
    doc: str,
    course: Course,
    make_tokenizer: Callable[[Iterable[str], int], Qwen2Tokenizer],
    recipe: Recipe,
    make_demonstrations: Callable[[], list[Demonstration]],
) -> None:
    """Train a tiny model from demonstrations and save it with its tokenizer in `--output FOLDER`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=Path, help="JSON lines: read if the file exists, else written")
    args = parser.parse_args()
    if args.demonstrations and args.demonstrations.exists():
        demonstrations = load(args.demonstrations)
    else:
        demonstrations = make_demonstrations()
        if args.demonstrations:
            save(args.demonstrations, demonstrations)
    model, tokenizer = teach(course, demonstrations, make_tokenizer, recipe, args.seed)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


def evaluate_model(
    parser: argparse.ArgumentParser,
    course: Course,
    load_tasks: Callable[[argparse.Namespace], tuple[Callable[[], TextEnvironment], Sequence[dict[str, Any]]]],
    max_turns: int,
) -> None:
    """Play each task once per temperature and print a line of JSON.

    Args:
        parser: parser with the environment's own arguments.
        course: the model's course.
        load_tasks: parsed arguments -> environment factory and rows.
        max_turns: turns per episode.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser.add_argument("model", help="folder of a model and its tokenizer")
    parser.add_argument("--limit", type=int, help="only this many tasks")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--max_turns", type=int, default=max_turns)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    make_environment, rows = load_tasks(args)
    rows = rows[: args.limit]
    for temperature in args.temperature:
        played = play(
            model,
            tokenizer,
            make_environment,
            course.template,
            course.history_length,
            rows,
            temperature,
            args.max_turns,
            args.seed,
        )
        print(json.dumps({"temperature": temperature, **summarize(played, rows)}), flush=True)
