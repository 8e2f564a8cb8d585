"""The tiny model that shops in the synthetic catalogue, and the setting in which it was trained."""

from __future__ import annotations

from pathlib import Path

from g2po_envs.webshop.environment import WebshopEnvironment
from g2po_envs.webshop.source import ShopSource

HISTORY_LENGTH = 8  # past actions, without the pages: what was chosen so far


def tiny_model_path() -> Path:
    """Return the folder of the model and its tokenizer, for `from_pretrained`; its README describes the training."""
    return Path(__file__).parent / "tiny_model"


def tiny_environment(source: ShopSource) -> WebshopEnvironment:
    """Return the environment in which the tiny model was trained; use it with `WEBSHOP_COMPACT_PROMPT`."""
    return WebshopEnvironment(source, plain=True)
