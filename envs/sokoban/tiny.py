"""The tiny model that pushes boxes, and the setting it was taught in."""

from __future__ import annotations

from pathlib import Path

from g2po_envs.sokoban.environment import SokobanEnvironment, expert

HISTORY_LENGTH = 0  # the grid is the whole state
MAX_TURNS = 15


def tiny_environment() -> SokobanEnvironment:
    """Return the environment in which the tiny model was taught; use it with `SOKOBAN_COMPACT_PROMPT`."""
    return SokobanEnvironment(positions=True)


def drawn_environment() -> SokobanEnvironment:
    """Return the environment of a tiny model that sees, see `make_tiny_vision_model`."""
    return SokobanEnvironment(render="image")


def describing_expert(environment: SokobanEnvironment) -> str:
    """Return a completion: where everything is, as `positions` says it, and a move of a shortest solution."""
    return f"<think>{environment.in_words()}</think><action>{expert(environment)}</action>"


def tiny_model_path() -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; its README describes the training."""
    return Path(__file__).parent / "tiny_model"
