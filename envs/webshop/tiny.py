"""The tiny model that shops in the invented shop, and the setting it was taught in."""

from __future__ import annotations

from pathlib import Path

from g2po_envs.webshop.environment import WebshopEnvironment
from g2po_envs.webshop.source import ShopSource

HISTORY_LENGTH = 8  # past actions, without the pages: what was chosen so far


def tiny_model_path() -> Path:
    """Folder of the model and its tokenizer, for `from_pretrained`. Its README says how it was made."""
    return Path(__file__).parent / "tiny_model"


def tiny_environment(source: ShopSource) -> WebshopEnvironment:
    """The environment as the tiny model was taught in it; to be used with `WEBSHOP_COMPACT_PROMPT`."""
    return WebshopEnvironment(source, plain=True)
