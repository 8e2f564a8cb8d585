"""Evaluation sets for `g2po evaluate --environment textworld`."""

from __future__ import annotations

from functools import partial

from g2po_envs.textworld.environment import TextWorldEnvironment
from g2po_envs.textworld.games import CACHE, KINDS, game_rows
from g2po_envs.textworld.prompts import TEXTWORLD_PROMPT
from g2po_trl.evaluation.panel import Panel, check_selection
from g2po_trl.utils.options import require

ABOUT = """You play a text game: you walk through rooms ("go north"), open things, take them and put them where they \
belong. You see the room you are in alone. The game is won when its objective is reached."""


def load_panel(name: str = "coin-5", number: int = 128, skip: int = 0, cache_dir: str = CACHE) -> Panel:
    """Return held-out games of a kind.

    Args:
        name: the kind, see `KINDS`.
        number: number of games.
        skip: number of preceding games to skip, e.g. games that selected a checkpoint.
        cache_dir: folder of the games.

    Raises:
        G2POError: if there is no such kind.
    """
    check_selection(number, skip)
    require(name in KINDS, "panel", name, f"choose one of {', '.join(KINDS)}")
    return Panel(
        name=f"TextWorld {name}",
        rows=game_rows(name, number, held_out=True, first=skip),
        environment_factory=partial(TextWorldEnvironment, cache_dir=cache_dir),
        prompt_template=TEXTWORLD_PROMPT,
        max_turns=30,
        about=ABOUT,
        lower_case=True,
        data=f"seeds {skip} to {skip + number - 1} of the held-out ones",
    )
