"""Demonstrations in synthetic catalogues: actions of an expert, on pages that a careless shopper reaches.

As in `g2po_envs.alfworld.demonstrations`: the careless shopper follows the expert most of the time, and otherwise
opens the wrong product, reads on, chooses another size or buys too early; the expert's action is recorded on every
page. The expert knows the score of each product. A reader of the page does not: over many goals, the expert's actions
show which of the products are likely to be right, and when to go back.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from g2po_envs.tiny.demonstration import Demonstration
from g2po_envs.webshop.environment import SEARCH, WebshopEnvironment
from g2po_envs.webshop.reward import score
from g2po_envs.webshop.shop import PER_PAGE, Shop

PAGES = 2  # of results, that the expert looks through
_NUMBER = re.compile(r"click\[\d+\]")
_BETWEEN = "' [SEP] '"


class Expert:
    """Expert that leads to the best purchase among the first results, from any page of a visit.

    Products are named by their place (`WebshopEnvironment(plain=True)`).
    """

    def __init__(self, environment: WebshopEnvironment):
        self.shop, self._nouns = environment.shop, environment.nouns
        goal = self.shop.goal
        self.search = f"search[{' '.join(goal.attributes)} {goal.query}]"

    def act(self) -> str:
        shop = self.shop
        if shop.has_search_bar:
            return self.search
        if "next >" in shop.clickables:
            return self._on_results()
        return self._on_item() if "buy now" in shop.clickables else "click[< prev]"

    def _on_results(self) -> str:
        target, worth = self._target()
        if worth < 1 and f"search[{' '.join(self.shop.query)}]" != self.search:
            return "click[back to search]"
        if target in self.shop.products:
            return f"click[{self.shop.products.index(target) + 1}]"
        return "click[next >]" if self.shop.page_number < PAGES else "click[< prev]"

    def _on_item(self) -> str:
        options, worth = self._best(self.shop.asin)
        if worth < self._target()[1]:
            return "click[< prev]"
        missing = [value for group, value in options.items() if self.shop.options.get(group) != value]
        return f"click[{missing[0]}]" if missing else "click[buy now]"

    def _target(self) -> tuple[str, float]:
        """Return the first of the best products found, and its score."""
        found = self.shop.catalogue.search(" ".join(self.shop.query))[: PAGES * PER_PAGE]
        return max(((asin, self._best(asin)[1]) for asin in found), key=lambda pair: pair[1], default=("", 0.0))

    def _best(self, asin: str) -> tuple[dict[str, str], float]:
        """Return the best options of a product, and its score with them."""
        product, goal = self.shop.catalogue.products[asin], self.shop.goal
        wanted = goal.options.values() if isinstance(goal.options, Mapping) else goal.options
        options = {
            group: value for group, values in product.options.items() for value in values if value in tuple(wanted)
        }
        return options, score(product, goal, product.price, options, self._nouns)[0]


def searches(shop: Shop) -> list[str]:
    """Return search queries for the goal, the most complete first."""
    goal = shop.goal
    words = [[*goal.attributes, goal.query], [goal.query], [goal.attributes[0], goal.query], list(goal.attributes)]
    return list(dict.fromkeys(f"search[{' '.join(some)}]" for some in words))


def demonstrate(
    environment: WebshopEnvironment, tasks: Iterable[dict[str, Any]], seed: int, max_turns: int = 12
) -> list[Demonstration]:
    """Return each page that a careless shopper visits in each task, with the expert's action."""
    shown = []
    for number, task in enumerate(tasks):
        shown += _walk(environment, task, random.Random(f"{seed}-{number}"), max_turns)
    return shown


def _walk(
    environment: WebshopEnvironment, task: dict[str, Any], rng: random.Random, max_turns: int
) -> list[Demonstration]:
    now = environment.reset(**task)
    told, expert = now.task, Expert(environment)
    carelessness = rng.choice((0.1, 0.3, 0.5))
    shown, history = [], []
    for turn in range(max_turns):
        actions, best = list(now.admissible_actions), expert.act()
        others = searches(environment.shop) if SEARCH in actions else []
        shown.append(Demonstration(told, now.text, actions, list(history), turn, best, others))
        action = _careless(others or actions, rng) if rng.random() < carelessness else best
        result = environment.step(action)
        history.append((now.text, action))
        now = result.observation
        if result.terminated:
            break
    return shown


def _careless(actions: Sequence[str], rng: random.Random) -> str:
    """Return a random action that does not end the visit, often a product."""
    actions = [action for action in actions if action != "click[buy now]"]
    products = [action for action in actions if _NUMBER.fullmatch(action)]
    return rng.choice(products if products and rng.random() < 0.7 else actions)


def vary(demonstration: Demonstration, rng: random.Random) -> Demonstration:
    """Return the demonstration, usually with only 1 to 6 products on a page of results.

    Choosing among two products is learned before choosing among ten.
    """
    first, products = _products_of(demonstration.observation)
    if not products or rng.random() < 0.3:
        return demonstration
    chosen = [int(demonstration.expert[6:-1]) - 1] if _NUMBER.fullmatch(demonstration.expert) else []
    rest = [i for i in range(len(products)) if i not in chosen]
    kept = sorted(chosen + rng.sample(rest, min(len(rest), rng.randint(1, 6) - len(chosen))))
    numbers = {f"click[{i + 1}]": f"click[{place}]" for place, i in enumerate(kept, 1)}
    shown = [part for place, i in enumerate(kept, 1) for part in (str(place), *products[i][1:])]
    return replace(
        demonstration,
        observation="'" + _BETWEEN.join([*first, *shown]) + "'",
        actions=[numbers.get(a, a) for a in demonstration.actions if a in numbers or not _NUMBER.fullmatch(a)],
        expert=numbers.get(demonstration.expert, demonstration.expert),
    )


def _products_of(page: str) -> tuple[list[str], list[list[str]]]:
    """Return the start of a page of results, and (place, title, price) of its products."""
    parts = page[1:-1].split(_BETWEEN)
    start = parts.index("next >") + 1 if "next >" in parts else len(parts)
    return parts[:start], [parts[i : i + 3] for i in range(start, len(parts), 3)]
