"""Goals of shoppers: synthetic goals (one for each choice of options), and goals written by people."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .catalogue import Catalogue, Product

NO_LIMIT = 1_000_000
_PRICES = range(10, 1000, 10)


@dataclass(frozen=True)
class Goal:
    """A product to find: the instruction, and the conditions for the score.

    Args:
        asin, category, query, title, product_category: those of the product from which the goal was made.
        instruction: the instruction to the shopper.
        attributes, options, price_upper: requirements for the bought product; `options` is a dict (group -> value) for
            synthetic goals, a list of values for human ones.
        weight: frequency with which it is drawn, relative to other goals.
    """

    asin: str
    category: str
    query: str
    title: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    price_upper: float
    options: Mapping[str, str] | tuple[str, ...]
    weight: float = 1.0


def synthetic_goals(catalogue: Catalogue, rng: random.Random) -> list[Goal]:
    """Return one goal for each product with an instruction and each choice of its options, in catalogue order.

    `rng` draws a price limit for each product, among the next four multiples of 10 above its price.
    """
    goals = []
    for product in catalogue.products.values():
        if product.instruction is None:
            continue
        upper, limit = _price_limit(product, rng)
        groups = sorted(product.options)
        for values in itertools.product(*(product.options[group] for group in groups)):
            options = dict(zip(groups, values))
            told = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{product.instruction}{f' with {told}' if told else ''}{limit}"
            goals.append(_goal(product, text, product.instruction_attributes, upper, options))
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    return [
        Goal(**{**vars(goal), "weight": sum(1 / counts[a] for a in goal.attributes) / len(goal.attributes)})
        for goal in goals
    ]


def human_goals(catalogue: Catalogue, rng: random.Random) -> list[Goal]:
    """Return one goal for each human instruction that names attributes, in catalogue order."""
    goals = []
    for product in catalogue.products.values():
        for instruction in product.instructions:
            if not instruction["instruction_attributes"]:
                continue
            upper, limit = _price_limit(product, rng)
            text = instruction["instruction"].strip(".") + limit
            attributes, options = instruction["instruction_attributes"], instruction["instruction_options"]
            goals.append(_goal(product, text, tuple(attributes), upper, tuple(options)))
    return goals


def _goal(product: Product, instruction: str, attributes: tuple, price_upper: float, options) -> Goal:
    return Goal(
        product.asin,
        product.category,
        product.query,
        product.title,
        product.product_category,
        instruction,
        attributes,
        price_upper,
        options,
    )


def _price_limit(product: Product, rng: random.Random) -> tuple[float, str]:
    above = [float(price) for price in _PRICES if price > product.price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    upper = max(rng.sample(above, 2))
    return upper, f", and price lower than {upper:.2f} dollars"
