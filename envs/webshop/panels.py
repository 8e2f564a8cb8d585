"""Evaluation sets for `g2po evaluate --environment webshop`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from g2po_envs.webshop.environment import WebshopEnvironment
from g2po_envs.webshop.nouns import NOUNS
from g2po_envs.webshop.prompts import PROMPTS
from g2po_envs.webshop.source import ShopSource
from g2po_envs.webshop.tiny import HISTORY_LENGTH
from g2po_trl.evaluation.checkpoints import files_hash
from g2po_trl.evaluation.panel import Panel, check_selection
from g2po_trl.utils.options import require

ABOUT = """You shop for somebody in an online shop. search[words] searches, where there is a search bar; \
click[target] clicks what the page shows: a product's number, an option, a page. Choose every option that was asked \
for, and end with click[buy now]: what you buy then is compared with what was asked for."""
COLUMNS = {"Score": "score", "Succ.": "success_rate", "Corrected": "score_corrected"}


def load_panel(
    name: str = "tiny",
    number: int | None = None,
    size: str = "small",
    goals: str = "synthetic",
    seed: int = 0,
    skip: int = 0,
    plain: bool | None = None,
    partial_reward: bool = False,
    nouns: str = "textblob",
) -> Panel:
    """Return an evaluation set by name.

    Args:
        name: "tiny", the default recipe's held-out goals in the synthetic catalogue; "invented", any goals of that
            catalogue; or the folder of the official data.
        number: number of goals. `None`: 192 of the synthetic catalogue, 500 of the official data.
        size: see `ShopSource.official`.
        goals: see `ShopSource.official`.
        seed: seed of the synthetic catalogue, of prices and price limits.
        skip: number of preceding goals to skip, e.g. goals that selected a checkpoint.
        plain: see `WebshopEnvironment`.
        partial_reward: see `WebshopEnvironment`.
        nouns: see `WebshopEnvironment`.
    """
    check_selection(number, skip)
    require(nouns in NOUNS, "nouns", nouns, f"choose one of {', '.join(NOUNS)}")
    tiny, invented = name == "tiny", name in ("tiny", "invented")
    source = ShopSource(goals=goals, seed=seed) if invented else ShopSource.official(name, size, goals, seed)
    number = (192 if invented else 500) if number is None else number
    files = [path for path in (source.items, source.attributes, source.human_instructions) if path]
    return Panel(
        name=f"WebShop {Path(name).name}",
        rows=source.rows("held-out", skip + number)[skip:],
        environment_factory=partial(
            WebshopEnvironment,
            source,
            plain=tiny if plain is None else plain,
            partial_reward=partial_reward,
            nouns=NOUNS[nouns],
        ),
        prompt_template=PROMPTS["compact" if tiny else "full"],
        max_turns=12 if tiny else 15,
        history_length=HISTORY_LENGTH if tiny else 2,
        about=ABOUT,
        lower_case=True,
        action_form="search[words] or click[target]",
        columns=COLUMNS,
        data=files_hash(files) if files else f"invented, seed {seed}",
    )
