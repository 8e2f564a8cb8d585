"""Evaluation sets for `g2po evaluate --environment alfworld`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from g2po_envs.alfworld.environment import AlfworldEnvironment
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.official import PREFIX, Release, official_games
from g2po_envs.alfworld.prompts import PROMPTS
from g2po_envs.alfworld.tiny import HIDDEN_ACTIONS, HISTORY_LENGTH
from g2po_trl.evaluation.panel import Panel, check_selection

COLUMNS = {  # the paper's table
    "Pick": "success_rate_by_type/pick_and_place_simple",
    "Look": "success_rate_by_type/look_at_obj_in_light",
    "Clean": "success_rate_by_type/pick_clean_then_place_in_recep",
    "Heat": "success_rate_by_type/pick_heat_then_place_in_recep",
    "Cool": "success_rate_by_type/pick_cool_then_place_in_recep",
    "Pick2": "success_rate_by_type/pick_two_obj_and_place",
    "All": "success_rate",
}
ABOUT = """You are in a house and do household tasks in it, by text. You can carry one thing at a time. To find a \
thing, go to places and open what is closed; to bring it somewhere, take it, go there and move it there. Things are \
cleaned with a sinkbasin, heated with a microwave and cooled with a fridge, while you carry them; a lamp is used \
where it stands, with the thing to be examined in your hand. "Nothing happens." means that the action was not \
possible."""


def panel_of(games: str | None) -> str:
    """Return the panel of a recipe's option: of `official:NAME`, of a folder, or of generated games (`None`)."""
    if games is None:
        return "generated"
    return games.removeprefix(PREFIX) if games.startswith(PREFIX) else str(Path(games).expanduser().absolute())


def find_games(name: str, number: int, seed: int, size: str, cache_dir: str, split: str = "held-out") -> Manifest:
    """Return the games of a panel, and generate missing ones; see `load_panel`."""
    if name in ("generated", "generated-report"):
        from g2po_envs.alfworld.games import generate_games, report_games

        root = Path(cache_dir).expanduser() / f"alfworld-{size}-{seed}"
        if name == "generated-report":
            return report_games(root, number, seed, size)
        return generate_games(root / f"{split}-{number}", split, number, seed=seed, size=size)
    return official_games(name) if name in Release.load().numbers else Manifest.scan(name)


def load_panel(
    name: str = "tiny",
    number: int = 192,
    seed: int = 0,
    compact: bool = False,
    cache_dir: str = "~/.cache/g2po_trl",
    key: str = "released",
    hidden_actions: Sequence[str] | None = None,
    intro: bool | None = None,
    size: str = "tiny",
) -> Panel:
    """Return an evaluation set by name.

    Args:
        name: "valid_seen", "valid_unseen" or "train" of the official games; "tiny", the default recipe's held-out
            generated games in the tiny model's setting; "generated", held-out games of any `size`, and
            "generated-report", further ones to report a choice made on them; or a folder of games.
        number: number of generated games.
        seed: seed of generated games.
        compact: use the tiny model's setting for a folder.
        cache_dir: folder of generated games.
        key: see `AlfworldEnvironment`.
        hidden_actions: see `AlfworldEnvironment`.
        intro: see `AlfworldEnvironment`.
        size: size of generated games.
    """
    check_selection(number)
    size, compact = ("tiny", True) if name == "tiny" else (size, compact)
    games = find_games("generated" if name == "tiny" else name, number, seed, size, cache_dir)
    options = {"hidden_actions": HIDDEN_ACTIONS, "intro": False} if compact else {}
    options |= {} if hidden_actions is None else {"hidden_actions": tuple(hidden_actions)}
    options |= {} if intro is None else {"intro": intro}
    return Panel(
        name=f"ALFWorld {Path(name).name}",
        rows=games.rows(),
        environment_factory=partial(AlfworldEnvironment, games, key=key, **options),
        prompt_template=PROMPTS["compact" if compact else "full"],
        max_turns=15 if compact else 50,
        history_length=HISTORY_LENGTH,
        about=ABOUT,
        lower_case=True,
        columns=COLUMNS,
        data=games.hash,
    )
