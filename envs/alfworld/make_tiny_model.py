"""Make the tiny model: `python -m g2po_envs.alfworld.make_tiny_model --output FOLDER`.

Generated training games -> demonstrations of an expert without knowledge of tools -> tokenizer -> supervised
fine-tuning in two phases (`g2po_envs.tiny`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tempfile
from collections.abc import Iterable
from pathlib import Path

from transformers import Qwen2Tokenizer

from g2po_envs.alfworld.augmentation import TYPE_NAMES, augment
from g2po_envs.alfworld.demonstrations import LimitedExpert, demonstrate
from g2po_envs.alfworld.games import generate_games
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment
from g2po_envs.tiny.demonstration import Demonstration
from g2po_envs.tiny.tokenizer import train_tokenizer
from g2po_envs.tiny.training import Course, Phase, Recipe, make_model

COURSE = Course(ALFWORLD_COMPACT_PROMPT, HISTORY_LENGTH, augment)
RECIPE = Recipe((Phase("read", 800, 2e-3, whole_sequence=True), Phase("act", 3200, 2e-3)))
VERBS = ("go", "to", "take", "from", "move", "open", "close", "clean", "heat", "cool", "with", "use", "examine")
NUMBERS = tuple(f" {number}" for number in range(1, 21))
GAME_SEED = 1000  # not the training recipe's: other games


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Return a tokenizer in which every name of a thing and every small number is one token."""
    return train_tokenizer(texts, vocab_size, [*(f" {name}" for name in TYPE_NAMES), *VERBS], NUMBERS)


def make_demonstrations(folder: Path, num_games: int = 2000, episodes: int = 3) -> list[Demonstration]:
    """Generate training games in `folder`, play each of them `episodes` times, and return demonstrations."""
    games = generate_games(folder, "train", num_games, seed=GAME_SEED, size="tiny")
    # Careless, so that many a place that it comes to does not hold the object.
    walk = {"expert_class": LimitedExpert, "carelessness": (0.3, 0.5, 0.7), "impossible": 0.1}
    return demonstrate(tiny_environment(games), games.rows(), episodes, GAME_SEED, **walk)


def _demonstrations() -> list[Demonstration]:
    with tempfile.TemporaryDirectory() as folder:
        return make_demonstrations(Path(folder, "games"))


if __name__ == "__main__":
    make_model(__doc__, COURSE, make_tokenizer, RECIPE, _demonstrations)
