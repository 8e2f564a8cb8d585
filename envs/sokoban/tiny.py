"""The tiny model that pushes boxes, and the setting it was taught in."""

from __future__ import annotations

from pathlib import Path

from g2po_envs.sokoban.environment import SokobanEnvironment

HISTORY_LENGTH = 0  # the grid is the whole state
MAX_TURNS = 15


def tiny_environment() -> SokobanEnvironment:
    """Return the environment in which the tiny model was taught; use it with `SOKOBAN_COMPACT_PROMPT`."""
    return SokobanEnvironment(positions=True)


def tiny_model_path() -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; its README describes the training."""
    return Path(__file__).parent / "tiny_model"
