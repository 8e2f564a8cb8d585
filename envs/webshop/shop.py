"""The shop: one visit, page by page, as in the official text environment.

A page is a list of elements. It has two texts: `text`, parts between `[SEP]` (which the paper's agents read), and
`rich`, one line per element with marked buttons.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .catalogue import Catalogue, Product
from .goals import Goal
from .reward import score

PER_PAGE = 10
MAX_TERMS = 1024  # Lucene refuses longer queries
_ACTION = re.compile(r"(.+)\[(.+)\]")
_SUB_PAGES = ("description", "features", "reviews", "attributes")
# A page is known by its address, and the address holds the query: the first of these that is part of it counts.
_PAGES = ("search_results", "item_page", "item_sub_page", "done")


@dataclass(frozen=True)
class Element:
    """A piece of a page. `kind`: "text", "button", "product" (a link), or "option" (of `group`)."""

    text: str
    kind: str = "text"
    group: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an action. `reward` is the score of a purchase; `done`: whether there was one."""

    reward: float = 0.0
    done: bool = False


@dataclass
class Shop:
    """One visit.

    Args:
        catalogue: the products.
        goal: the shopper's goal.
        nouns: title -> its nouns (see `reward.score`).
        show_attributes: whether item pages have a sub-page of attributes.
        session: name of the visit, and seed of its random draws.
    """

    catalogue: Catalogue
    goal: Goal
    nouns: Callable[[str], Sequence[str]]
    show_attributes: bool = False
    session: str = "0"
    query: list[str] = field(default_factory=list)
    page_number: int = 1
    asin: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    visited: set[str] = field(default_factory=set)
    purchase: dict | None = None
    _elements: list[Element] = field(default_factory=list)
    _address: str = ""

    def __post_init__(self):
        self._start()

    # -- what is seen ----------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The page as parts between [SEP]."""
        return " [SEP] ".join(e.text.strip() for e in self._shown)

    @property
    def rich(self) -> str:
        """The page in lines, with marked buttons, preceded by the clicked options."""
        lines, clicked = [], []
        for element in self._shown:
            mark = "button"
            if element.kind == "option" and f'"{element.text}"' in self._address:
                clicked.insert(0, f"You have clicked {element.text}.")
                mark = "clicked button"
            if element.kind == "product" and element.text in self.visited:
                mark = "clicked button"
            line = element.text if element.kind == "text" else f"[{mark}] {element.text} [{mark}_]"
            lines.append({"option": f"  {line}", "product": f"\n{line}"}.get(element.kind, line))
        return "".join(f"{line}\n" for line in [*clicked, *lines])

    @property
    def _shown(self) -> list[Element]:
        """Return the page's elements; blank texts become one blank, or nothing if empty or with a line break."""
        blank = [e.text.isspace() for e in self._elements]
        return [
            Element(" ") if is_blank else element
            for element, is_blank in zip(self._elements, blank)
            if element.text and not (is_blank and "\n" in element.text)
        ]

    @property
    def has_search_bar(self) -> bool:
        return not self._address

    @property
    def clickables(self) -> list[str]:
        """Return the clickable texts in the order shown: buttons, products, options."""
        return list(self._targets())

    @property
    def products(self) -> list[str]:
        """Return the asins of the products on the page, in the order shown."""
        return [e.text for e in self._elements if e.kind == "product"]

    def _targets(self) -> dict[str, Element]:
        """Return clickable elements by text. Of two equal texts, the first has the place and the last the effect."""
        order = {"button": 0, "product": 1, "option": 2}
        elements = sorted((e for e in self._elements if e.kind in order), key=lambda e: order[e.kind])
        return {e.text if e.kind == "option" else e.text.lower(): e for e in elements}

    # -- what can be done ------------------------------------------------------------------------------------------

    def act(self, action: str) -> Outcome:
        """Play `search[words]` or `click[target]`. Anything else changes nothing."""
        found = _ACTION.match(action)
        if not found:
            return Outcome()
        name, argument = found[1], found[2].lower()
        if name == "search":
            self._search(argument.split(" "), 1)
        elif name == "click" and argument != "search" and argument in (targets := self._targets()):
            return self._click(argument, targets[argument])
        return Outcome()

    def _click(self, target: str, element: Element) -> Outcome:
        page = next((page for page in _PAGES if page in self._address), None)
        if target == "back to search":
            self._start()
        elif target == "next >" and page == "search_results":
            self._search(self.query, self.page_number + 1)
        elif target == "< prev" and page == "search_results":
            self._search(self.query, self.page_number - 1)
        elif target == "< prev" and page == "item_sub_page":
            self._show_item()
        elif target == "< prev" and page == "item_page":
            self._search(self.query, self.page_number)
        elif target in _SUB_PAGES:
            self._show_sub_page(target)
        elif target == "buy now":
            return self._buy()
        elif element.kind == "product":
            self.asin = element.text
            self.visited.add(element.text)
            self._show_item()
        elif element.kind == "option":
            self.options[element.group] = target
            self._show_item()
        return Outcome()

    def _buy(self) -> Outcome:
        product = self._product
        bought = (product, self.goal, product.price, self.options, self.nouns)
        value, parts = score(*bought)
        corrected, _ = score(*bought, corrected=True)
        self.purchase = {
            "asin": product.asin,
            "options": dict(self.options),
            "score": value,
            "score_corrected": corrected,
            **parts,
        }
        self._show_done(value)
        return Outcome(value, True)

    @property
    def _product(self) -> Product:
        return self.catalogue.products[self.asin]

    # -- pages -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._address, self.visited = "", set()
        told = [Element("Instruction: "), Element(self.goal.instruction)]
        self._elements = [Element("WebShop"), *told, Element("Search", "button")]

    def _head(self) -> list[Element]:
        return [Element("Instruction:"), Element(self.goal.instruction), Element("Back to Search", "button")]

    def _search(self, query: list[str], page_number: int) -> None:
        if len(set(query)) > MAX_TERMS:
            return
        self.query, self.page_number, self.asin, self.options = query, page_number, None, {}
        self._address = f"search_results/{self.session}/{'+'.join(query)}/{page_number}"
        found = self.catalogue.search(" ".join(query), random.Random(f"{self.session} {page_number}"))
        elements = [*self._head(), Element(f"Page {page_number} (Total results: {len(found)})")]
        if page_number > 1:
            elements.append(Element("< Prev", "button"))
        elements.append(Element("Next >", "button"))
        for asin in found[(page_number - 1) * PER_PAGE : page_number * PER_PAGE]:
            product = self.catalogue.products[asin]
            elements += [Element(asin, "product"), Element(product.title), Element(product.price_tag)]
        self._elements = elements

    def _show_item(self) -> None:
        product = self._product
        chosen = json.dumps(self.options)
        self._address = f"item_page/{self.session}/{self.asin}/{'+'.join(self.query)}/{self.page_number}/{chosen}"
        elements = [*self._head(), Element("< Prev", "button")]
        for group, values in product.options.items():
            elements += [Element(group), *(Element(value, "option", group) for value in values)]
        elements += [Element(product.title), Element(f"Price: {product.price_tag}"), Element("Rating: N.A.")]
        names = [name for name in _SUB_PAGES if name != "attributes" or self.show_attributes]
        self._elements = [*elements, *(Element(name.title(), "button") for name in [*names, "buy now"])]

    def _show_sub_page(self, name: str) -> None:
        product = self._product
        self._address = (
            f"item_sub_page/{self.session}/{self.asin}/{'+'.join(self.query)}/{self.page_number}/{name}/"
            f"{json.dumps(self.options)}"
        )
        texts = {
            "description": [product.description],
            "features": [f" {bullet}" for bullet in product.bullets],
            "reviews": [],
            "attributes": [
                *(f" {attribute}" for attribute in product.attributes),
                product.category,
                product.query,
                product.product_category,
            ],
        }[name]
        self._elements = [*self._head(), Element("< Prev", "button"), *map(Element, texts)]

    def _show_done(self, value: float) -> None:
        self._address = f"done/{self.session}/{self.asin}/{json.dumps(self.options)}"
        bought = ["Purchased", "asin", self.asin, "options", _json_in_html(self.options)]
        unknown = ["attrs", "None", "category", "None", "query", "None", "product category", "None"]
        target = [
            "asin",
            "options",
            "attrs",
            "price upper",
            "instuction text",
            "category",
            "product category",
            "query",
        ]
        texts = [
            *("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
            *bought,
            *unknown,
            *("Target", *target, "Goal ", "None"),
            *("Reward", "Your score (min 0.0, max 1.0)", repr(value), "Reward Details ", "None"),
        ]
        self._elements = [Element(text) for text in texts]


def _json_in_html(options: Mapping[str, str]) -> str:
    text = json.dumps(options, sort_keys=True)
    for character in "&<>'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
