"""The bundled tiny model, and the setting in which it was trained."""

from __future__ import annotations

from pathlib import Path

from g2po_envs.alfworld.environment import AlfworldEnvironment
from g2po_envs.alfworld.manifest import Manifest

# Actions that change nothing: left out of what a tiny model has to read.
HIDDEN_ACTIONS = ("help", "look", "inventory", "examine")
HISTORY_LENGTH = 2


def tiny_model_path() -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; its README describes the training."""
    return Path(__file__).parent / "tiny_model"


def tiny_environment(manifest: Manifest, key: str = "released") -> AlfworldEnvironment:
    """Return the environment in which the tiny model was trained; use it with `ALFWORLD_COMPACT_PROMPT`."""
    return AlfworldEnvironment(manifest, hidden_actions=HIDDEN_ACTIONS, intro=False, key=key)
