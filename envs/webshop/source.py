"""The source of a shop, and its training goals: small enough to send to worker processes.

A source is a description; each process makes the same catalogue and goals from it, once. Goals are split by product:
products of evaluation goals are never bought in training. (The paper's code split a list that each worker had shuffled
with its own seed, so that its two parts overlap.)
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from g2po_trl.utils.options import require

from .catalogue import Catalogue
from .goals import Goal, human_goals, synthetic_goals
from .synthetic import make_records

SPLITS = ("train", "held-out")
HELD_OUT_SHARE = 0.3  # of the products
_SUFFIX = {"small": "_1000", "full": ""}


@dataclass(frozen=True)
class ShopSource:
    """A shop's data and goals.

    Args:
        items, attributes, human_instructions: the official files. `items=None`: the bundled synthetic catalogue.
        products: number of products: of the synthetic catalogue, or of the file, from its beginning (`None`: all).
        goals: "synthetic" (one for each choice of options) or "human" (instructions by people).
        seed: seed of the synthetic catalogue, of prices and price limits.
    """

    items: str | None = None
    attributes: str | None = None
    human_instructions: str | None = None
    products: int | None = None
    goals: str = "synthetic"
    seed: int = 0

    def __post_init__(self):
        require(self.goals in ("synthetic", "human"), "goals", self.goals, "choose 'synthetic' or 'human'")
        if self.items is not None:
            require(self.attributes is not None, "attributes", None, "pass the items_ins_v2 file of the items")
            has_goals = self.goals == "synthetic" or self.human_instructions is not None
            require(has_goals, "human_instructions", None, "pass the items_human_ins file, or goals='synthetic'")

    @classmethod
    def official(
        cls, directory: str | Path, size: str = "small", goals: str = "synthetic", seed: int = 0
    ) -> ShopSource:
        """Return the official data in `directory`: the "small" set of 1,000 products, or the "full" one.

        Raises:
            G2POError: for another size, or if a file is missing; the message names it.
        """
        require(size in _SUFFIX, "size", size, f"choose one of {', '.join(_SUFFIX)}")
        names = [f"items_shuffle{_SUFFIX[size]}.json", f"items_ins_v2{_SUFFIX[size]}.json", "items_human_ins.json"]
        paths = [Path(directory).expanduser() / name for name in names]
        for path in paths[: 3 if goals == "human" else 2]:
            remedy = f"{path.name} is not there, WebShop's setup script fetches it (see its repository)"
            require(path.is_file(), "directory", str(directory), remedy)
        people = str(paths[2]) if paths[2].is_file() else None
        return cls(str(paths[0]), str(paths[1]), people, goals=goals, seed=seed)

    def load(self) -> tuple[Catalogue, dict[str, Goal]]:
        """Return the shop and its goals by id, cached per process."""
        return _load(self)

    def rows(self, split: str, number: int | None = None) -> list[dict[str, str]]:
        """Return dataset rows of a split (`task_id`, `task_type`), in an order that depends only on the goals.

        Args:
            split: "train" or the held-out split.
            number: number of rows, one of each product before a second of any. `None`: all.

        Raises:
            G2POError: for another split, or if there are fewer goals.
        """
        require(split in SPLITS, "split", split, f"choose one of {', '.join(SPLITS)}")
        goals = {i: g for i, g in sorted(self.load()[1].items()) if (self._held_out(g.asin)) == (split == "held-out")}
        turn: Counter[str] = Counter()
        rounds = []
        for task_id, goal in goals.items():
            rounds.append((turn[goal.asin], task_id, goal.category))
            turn[goal.asin] += 1
        rows = [{"task_id": task_id, "task_type": category} for _, task_id, category in sorted(rounds)]
        is_enough = number is None or number <= len(rows)
        require(is_enough, "number", number, f"the shop has {len(rows)} {split} goals, ask for fewer")
        return rows[:number]

    def _held_out(self, asin: str) -> bool:
        digest = hashlib.blake2b(f"{self.seed} {asin}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < HELD_OUT_SHARE

    def summary(self, rows: Sequence[dict[str, str]]) -> str:
        """Return one line with the number of goals by category, and their hash."""
        kinds = Counter(row["task_type"] for row in rows)
        names = hashlib.sha256("\n".join(sorted(row["task_id"] for row in rows)).encode()).hexdigest()[:12]
        return f"{len(rows)} goals ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}); manifest {names}"


def goal_id(goal: Goal) -> str:
    """Return the id of a goal, derived from its instruction and its conditions."""
    content = [goal.asin, goal.instruction, list(goal.attributes), goal.price_upper, str(goal.options)]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@cache
def _load(source: ShopSource) -> tuple[Catalogue, dict[str, Goal]]:
    rng = random.Random(source.seed)
    if source.items is None:
        catalogue = Catalogue.from_records(*make_records(source.products or 300, source.seed), rng, "invented shop")
    else:
        catalogue = Catalogue.load(
            source.items, source.attributes, source.human_instructions, rng, number=source.products
        )
    goals = (synthetic_goals if source.goals == "synthetic" else human_goals)(catalogue, rng)
    return catalogue, {goal_id(goal): goal for goal in goals}
