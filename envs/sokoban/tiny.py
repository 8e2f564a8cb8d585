"""The tiny model that pushes boxes, and the setting it was taught in."""

from __future__ import annotations

from pathlib import Path

HISTORY_LENGTH = 0  # the grid is the whole state


def tiny_model_path() -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; its README describes the training."""
    return Path(__file__).parent / "tiny_model"
