"""WebShop as a `TextEnvironment`: find and buy the product that an instruction asks for.

An observation is the page after the instruction, with its parts in quotes, as in the paper's released code. The state
key is this text and the options chosen so far: in the official environment, the text does not show chosen options, so
choosing one would be a self-loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from g2po_envs.webshop.nouns import textblob_nouns
from g2po_envs.webshop.shop import Shop
from g2po_envs.webshop.source import ShopSource
from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.utils.options import require

SEARCH = "search[<your query>]"
_SEPARATOR = " [SEP] "
_PLACE = re.compile(r"click\[(\d+)\]")


class WebshopEnvironment(TextEnvironment):
    """Plays the goals of a source.

    Args:
        source: the shop; the `task_id` of `reset` is one of its goals.
        success_reward: reward of a purchase that meets all requirements (score 1).
        partial_reward: return `success_reward` times the score instead.
        nouns: function from a title to its nouns, for the score.
        plain: for tiny models. Pages are in lower case, so that a word is the same token in the instruction and on a
            page, and products on a page of results are named by their place, `click[3]`, not by their asin.
    """

    def __init__(
        self,
        source: ShopSource,
        success_reward: float = 10.0,
        partial_reward: bool = False,
        nouns: Callable[[str], Sequence[str]] = textblob_nouns,
        plain: bool = False,
    ):
        self.source = source
        self.success_reward = success_reward
        self.partial_reward = partial_reward
        self.nouns = nouns
        self.plain = plain
        self.shop: Shop | None = None  # the visit under way

    def reset(self, task_id: str, **ignored_columns) -> Observation:
        """Start the visit for a goal."""
        catalogue, goals = self.source.load()
        remedy = f"none of the shop's {len(goals)} goals, was it made from another source?"
        require(task_id in goals, "task_id", task_id, remedy)
        self.shop = Shop(catalogue, goals[task_id], self.nouns, session=task_id)
        return self._observe()

    def step(self, action: str) -> StepResult:
        """Play `search[words]` or `click[target]`; other actions change nothing."""
        if self.shop is None:
            raise RuntimeError("call reset before step")
        place = _PLACE.fullmatch(action) if self.plain else None
        if place and 0 < int(place[1]) <= len(self.shop.products):
            action = f"click[{self.shop.products[int(place[1]) - 1]}]"
        outcome = self.shop.act(action)
        won = outcome.reward == 1.0
        paid = outcome.reward if self.partial_reward else float(won)
        info = {}
        if outcome.done:
            info = {"success": won} | {name: self.shop.purchase[name] for name in ("score", "score_corrected")}
        return StepResult(self._observe(), self.success_reward * paid, terminated=outcome.done, info=info)

    def close(self) -> None:
        self.shop = None

    def _observe(self) -> Observation:
        shop = self.shop
        parts = shop.text.split(_SEPARATOR)
        told = parts.index(shop.goal.instruction) + 1 if shop.goal.instruction in parts else 0
        places = {asin: str(i) for i, asin in enumerate(shop.products, 1)} if self.plain else {}
        text = _SEPARATOR.join(f"'{places.get(part, part)}'" for part in parts[told:])
        text = text.lower().replace(_SEPARATOR.lower(), _SEPARATOR) if self.plain else text
        targets = {asin.lower(): place for asin, place in places.items()}
        clicks = [f"click[{targets.get(target, target)}]" for target in shop.clickables if target != "search"]
        return Observation(
            text,
            f"{text}\n{json.dumps(shop.options, sort_keys=True)}",
            [*([SEARCH] if shop.has_search_bar else []), *clicks],
            shop.goal.instruction,
        )
