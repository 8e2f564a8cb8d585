"""WebShop without Java: the official text environment's pages, search and rewards, over the official data files."""

from .catalogue import Catalogue, Product
from .goals import Goal, human_goals, synthetic_goals
from .shop import Outcome, Shop

__all__ = ["Catalogue", "Goal", "Outcome", "Product", "Shop", "human_goals", "synthetic_goals"]
