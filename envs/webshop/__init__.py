"""WebShop without Java: the official pages, search and rewards, on official data or a synthetic catalogue."""

from .catalogue import Catalogue, Product
from .environment import WebshopEnvironment
from .goals import Goal, human_goals, synthetic_goals
from .prompts import WEBSHOP_COMPACT_PROMPT, WEBSHOP_PROMPT
from .shop import Outcome, Shop
from .source import ShopSource

__all__ = [
    "WEBSHOP_COMPACT_PROMPT",
    "WEBSHOP_PROMPT",
    "Catalogue",
    "Goal",
    "Outcome",
    "Product",
    "Shop",
    "ShopSource",
    "WebshopEnvironment",
    "human_goals",
    "synthetic_goals",
]
