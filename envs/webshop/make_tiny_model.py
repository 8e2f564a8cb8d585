"""Make the tiny model: `python -m g2po_envs.webshop.make_tiny_model --output FOLDER`.

Synthetic catalogues -> demonstrations -> tokenizer -> layers of the ALFWorld model, which copies -> supervised
fine-tuning in phases (`g2po_envs.tiny`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterable

from transformers import Qwen2Tokenizer

from g2po_envs.alfworld.tiny import tiny_model_path as alfworld_model_path
from g2po_envs.tiny.demonstration import Demonstration
from g2po_envs.tiny.tokenizer import train_tokenizer
from g2po_envs.tiny.training import Course, Phase, Recipe, make_model
from g2po_envs.webshop.demonstrations import demonstrate, vary
from g2po_envs.webshop.prompts import WEBSHOP_COMPACT_PROMPT
from g2po_envs.webshop.source import ShopSource
from g2po_envs.webshop.synthetic import vocabulary
from g2po_envs.webshop.tiny import HISTORY_LENGTH, tiny_environment

COURSE = Course(WEBSHOP_COMPACT_PROMPT, HISTORY_LENGTH, vary)
RECIPE = Recipe(
    vocab_size=2560,
    phases=(
        Phase("repeat few", 250, 2e-3, repeat=200),
        Phase("repeat all", 450, 2e-3, repeat=10**4),
        Phase("read", 300, 2e-3, whole_sequence=True),
        Phase("act", 2500, 2e-3),
        Phase("loosen", 300, 5e-4, noise=0.25),
    ),
    bf16=True,
    layers_of=alfworld_model_path(),
)
SHOP_SEED = 1000  # not the training recipe's: other shops
# Numbers are read two digits at a time; what frames a page's parts or an action's words is one token.
PIECES = ("' [SEP] '", ": ", "search[", "click[", "]", *(f"{pair:02d}" for pair in range(100)))


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Return a tokenizer with one token per word of the shop, pair of digits and separator."""
    return train_tokenizer(texts, vocab_size, [way for word in vocabulary() for way in (word, f" {word}")], PIECES)


def make_demonstrations(shops: int = 40, goals: int = 190) -> list[Demonstration]:
    """Return demonstrations from several synthetic shops."""
    shown = []
    for seed in range(SHOP_SEED, SHOP_SEED + shops):
        source = ShopSource(seed=seed)
        shown += demonstrate(tiny_environment(source), source.rows("train", goals), seed)
    return shown


if __name__ == "__main__":
    make_model(__doc__, COURSE, make_tokenizer, RECIPE, make_demonstrations)
