"""A synthetic catalogue: a few hundred fictitious products in the official schema, generated from a seed.

It is small (short titles, few options), so that a tiny model can learn to shop; search, pages, options and reward are
those of the full shop.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from g2po_trl.utils.options import require

_WORDS = Path(__file__).with_name("invented.json")


@dataclass(frozen=True)
class _Kind:
    """A kind of product: its names and queries, possible attributes, parts and options."""

    name: str
    query: str
    category: str
    path: str
    attributes: list[str]
    parts: list[str]
    options: dict[str, list[str]]


@cache
def _words() -> tuple[list[_Kind], list[str]]:
    """Return the kinds and brands."""
    words = json.loads(_WORDS.read_text(encoding="utf-8"))
    values = words["values"]
    kinds = [
        _Kind(**{**kind, "options": {name: values[of] for name, of in kind["options"].items()}})
        for kind in words["kinds"]
    ]
    return kinds, words["brands"]


def vocabulary() -> list[str]:
    """Return the sorted lower-case words of descriptions, instructions and options, without brands."""
    kinds, _ = _words()
    told = [text for k in kinds for text in (k.name, k.query, *k.attributes, *k.parts, *sum(k.options.values(), []))]
    return sorted({word for text in told for word in re.findall("[a-z]+", text.lower())})


def make_records(products: int = 300, seed: int = 0) -> tuple[list[dict], dict[str, dict], dict[str, list[dict]]]:
    """Return the contents of the three official files: items, attributes with goals, human-style instructions.

    Args:
        products: number of products, spread evenly over 20 kinds.
        seed: determines the catalogue.

    Raises:
        G2POError: for fewer products than kinds, or more than 10,000.
    """
    kinds, brands = _words()
    remedy = f"make at least {len(kinds)}, one of each kind, and at most 10000"
    require(len(kinds) <= products <= 10**4, "products", products, remedy)
    rng = random.Random(f"webshop {seed}")
    items, attributes, instructions = [], {}, {}
    numbers = rng.sample(range(10**4), products)  # short: a tiny model has to copy them
    for i, number in enumerate(numbers):
        kind, asin = kinds[i % len(kinds)], f"B{number:04d}"
        owned = rng.sample(kind.attributes, 3)
        items.append(_item(rng, kind, rng.choice(brands), asin, owned))
        wanted = rng.sample(owned, rng.randint(1, 2))
        attributes[asin] = {
            "attributes": owned,
            "instruction": f"Find me {', '.join(wanted)} {kind.query}",
            "instruction_attributes": wanted,
        }
        instructions[asin] = [_human(rng, kind, asin, owned, items[-1]["customization_options"])]
    order = rng.sample(range(products), products)
    return [items[i] for i in order], attributes, instructions


def _item(rng: random.Random, kind: _Kind, brand: str, asin: str, owned: list[str]) -> dict[str, Any]:
    part, other = rng.sample(kind.parts, 2)
    # Not all that a product is stands in its title: some of it has to be looked up.
    title = f"{brand} {owned[0].title()} {kind.name} with {part.title()}"
    low = round(rng.uniform(4, 80), 2)
    return {
        "asin": asin,
        "name": title,
        "full_description": f"The {brand} {kind.name.lower()} is {owned[1]}. Its {part} and {other} are made to last.",
        "small_description": [f"{owned[2].capitalize()}", f"With {part} and {other}"],
        "pricing": f"${low}" if rng.random() < 0.7 else f"${low} - ${round(low * rng.uniform(1.1, 1.5), 2)}",
        "images": [""],
        "category": kind.category,
        "query": kind.query,
        "product_category": kind.path,
        "customization_options": {
            name: [{"value": value, "image": None} for value in rng.sample(values, min(3, len(values)))]
            for name, values in kind.options.items()
        },
    }


def _human(rng: random.Random, kind: _Kind, asin: str, owned: list[str], options: dict) -> dict[str, Any]:
    wanted = rng.sample(owned, rng.randint(1, 2))
    chosen = [rng.choice(values)["value"] for values in options.values()]
    opening = rng.choice(("i want", "i am looking for", "show me", "i need"))
    return {
        "asin": asin,
        "instruction": f"{opening} {kind.query} that are {' and '.join(wanted)}, in {' and '.join(chosen)}.",
        "attributes": owned,
        "options": [f"{name}: {value}" for name, value in zip(options, chosen)],
        "instruction_attributes": wanted,
        "instruction_options": chosen,
    }
