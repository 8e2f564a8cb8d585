"""Products and instructions in the official file formats of WebShop, read into plain data."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.options import require

from .search import SearchIndex

NO_PRICE = 100.0
NO_ATTRIBUTES = ("DUMMY_ATTR",)
_ASIN_LENGTH = 10


@dataclass(frozen=True)
class Product:
    """One product of the shop.

    Args:
        asin: its name in the shop.
        title, description, bullets: its texts.
        category, query, product_category: its kind; `product_category` is a path ("A › B › C").
        price: price in dollars.
        price_tag: the shown price, "$21.8" or "$10.0 to $20.0".
        options: group -> values, in the order shown.
        attributes: its attributes ("water resistant").
        instruction, instruction_attributes: those of a synthetic goal.
        instructions: those of human goals.
    """

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    query: str
    product_category: str
    price: float
    price_tag: str
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...] = NO_ATTRIBUTES
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    instructions: tuple[Mapping[str, Any], ...] = ()

    @property
    def contents(self) -> str:
        """Return the searchable text: title, description, first bullet, options."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()


@dataclass
class Catalogue:
    """The shop's products by asin, in order of their file."""

    products: dict[str, Product]
    results: int = field(default=50, kw_only=True)

    @cached_property
    def index(self) -> SearchIndex:
        products = self.products.values()
        return SearchIndex([p.asin for p in products], [p.contents for p in products])

    def search(self, query: str, chance: random.Random | None = None) -> list[str]:
        """Return the asins for a query, best first.

        `<q> words` and `<c> word` list products by query and category; `<r>` draws random ones.
        """
        words = query.split(" ")
        tag, rest = words[0], " ".join(words[1:]).strip()
        if tag == "<q>":
            return [p.asin for p in self.products.values() if p.query == rest]
        if tag == "<c>":
            return [p.asin for p in self.products.values() if len(words) > 1 and p.category == words[1].strip()]
        if tag == "<r>":
            names = list(self.products)
            return (chance or random.Random(0)).sample(names, min(self.results, len(names)))
        return self.index.search(query, self.results)

    @classmethod
    def load(
        cls,
        items: str | Path,
        attributes: str | Path,
        human_instructions: str | Path | None = None,
        rng: random.Random | None = None,
        number: int | None = None,
    ) -> Catalogue:
        """Read the official files `items_shuffle*.json`, `items_ins_v2*.json` and `items_human_ins.json`.

        Args:
            items: file of products.
            attributes: file of attributes and synthetic goals.
            human_instructions: file of human goals.
            rng: draws prices from price ranges, one draw per product in the order of the file. `None`: seed 0.
            number: number of items to read. `None`: all.

        Raises:
            G2POError: for a file in another format; names the file and the item.
        """
        return cls.from_records(
            _read_json(items, list)[:number],
            _read_json(attributes, dict),
            _read_json(human_instructions, dict) if human_instructions else {},
            rng or random.Random(0),
            str(items),
        )

    @classmethod
    def from_records(
        cls,
        items: Iterable[Mapping[str, Any]],
        attributes: Mapping[str, Mapping],
        human_instructions: Mapping[str, Iterable[Mapping]],
        rng: random.Random,
        name: str = "catalogue",
    ) -> Catalogue:
        """Return a catalogue from the content of the files; `name` appears in errors."""
        products: dict[str, Product] = {}
        for position, record in enumerate(items):
            try:
                asin = record["asin"]
                if asin == "nan" or len(asin) > _ASIN_LENGTH or asin in products:
                    continue
                products[asin] = _product(record, attributes.get(asin, {}), human_instructions.get(asin, ()), rng)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise G2POError(f"{name}, item {position}: not a WebShop product ({error!r})", name) from error
        return cls(products)


def _product(record: Mapping[str, Any], about: Mapping, instructions: Iterable, rng: random.Random) -> Product:
    prices, tag = _prices(record.get("pricing"))
    bullets = record["small_description"]
    return Product(
        asin=record["asin"],
        title=record["name"],
        description=record["full_description"],
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        category=record["category"],
        query=record["query"].lower().strip(),
        product_category=record["product_category"],
        price=rng.uniform(*prices) if len(prices) > 1 else prices[0],
        price_tag=tag,
        options={
            name.lower(): tuple(_option_value(option["value"]) for option in options)
            for name, options in (record["customization_options"] or {}).items()
            if options is not None
        },
        attributes=tuple(about.get("attributes", NO_ATTRIBUTES)),
        instruction=about.get("instruction"),
        instruction_attributes=tuple(about.get("instruction_attributes") or ()),
        instructions=tuple(instructions),
    )


def _prices(text: str | None) -> tuple[list[float], str]:
    """Return the prices in a text like "$10 - $20.5", and their display text."""
    if not text:
        return [NO_PRICE], f"${NO_PRICE}"
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in text.split("$")[1:]][:2]
    return prices, " to ".join(f"${price}" for price in prices)


def _option_value(text: str) -> str:
    return text.strip().replace("/", " | ").lower()


def _read_json(path: str | Path, kind: type) -> Any:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        content = error  # refused below, like JSON of another type
    remedy = f"it holds no JSON {kind.__name__}: is it a file of the WebShop data?"
    require(isinstance(content, kind), str(path), type(content).__name__, remedy)
    return content
