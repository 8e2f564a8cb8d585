"""The command that makes a tiny model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import Qwen2Tokenizer

from g2po_envs.tiny.demonstration import Demonstration, load, save
from g2po_envs.tiny.training import Course, Recipe, teach


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
