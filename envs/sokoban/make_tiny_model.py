"""Write what the tiny model is taught from: `python -m g2po_envs.sokoban.make_tiny_model --output FOLDER`.

The folder gets an untrained model with its tokenizer, and tasks.jsonl. `g2po teach` does the rest; the model's README
has the command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from g2po_envs.sokoban.games import level_rows
from g2po_envs.sokoban.solver import MOVES
from g2po_envs.tiny.tokenizer import train_tokenizer
from g2po_envs.tiny.training import Recipe, build_model
from g2po_trl.utils.json import write_json_lines

FIRST_LEVEL = 1_000_000  # not the training recipe's: other levels
RECIPE = Recipe((), vocab_size=512, hidden_size=64, intermediate_size=192, num_layers=2)
# A thing and its place are one token: as several, a model so small does not bring them together.
PLACES = [f"{down:+d}{right:+d}" for down in range(-3, 4) for right in range(-3, 4)]
PIECES = [f"you+{row}+{column}" for row in range(1, 5) for column in range(1, 5)]
PIECES += [f" {kind}{place}" for kind in ("wall", "box", "goal") for place in PLACES]


def make_tokenizer():
    """Return a tokenizer with one token per direction, and per thing and place."""
    return train_tokenizer(["user\nassistant\n"] * 1000, RECIPE.vocab_size, list(MOVES), PIECES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model, its tokenizer and the tasks")
    parser.add_argument("--levels", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    build_model(RECIPE, tokenizer).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    write_json_lines(args.output / "tasks.jsonl", level_rows("small", args.levels, first=FIRST_LEVEL))


if __name__ == "__main__":
    main()
