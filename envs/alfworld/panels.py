"""Panels for `python -m g2po_trl.evaluate --environment alfworld`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from g2po_envs.alfworld.environment import AlfworldEnvironment
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.official import Release, official_games
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT, ALFWORLD_PROMPT
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment
from g2po_trl.tasks import Panel

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


def load_panel(
    name: str = "tiny",
    number: int = 192,
    seed: int = 0,
    compact: bool = False,
    cache_dir: str = "~/.cache/g2po_trl",
    key: str = "released",
) -> Panel:
    """A panel by name.

    Args:
        name: "valid_seen", "valid_unseen" or "train" of the official games; "tiny", the default recipe's held-out
            generated games; or a folder of games.
        number, seed, cache_dir: of generated games.
        compact: for a folder: play as the tiny model was taught.
        key: of `AlfworldEnvironment`: what tells states apart in the trajectories that are written.
    """
    if name == "tiny":
        from g2po_envs.alfworld.games import generate_games

        folder = Path(cache_dir).expanduser() / f"alfworld-tiny-{seed}" / f"held-out-{number}"
        generate_games(folder, "held-out", number, seed=seed, size="tiny")
        games, compact = Manifest.scan(folder), True
    elif name in Release.load().numbers:
        games = official_games(name)
    else:
        games = Manifest.scan(name)
    return Panel(
        name=f"ALFWorld {name}",
        rows=games.rows(),
        environment_factory=partial(tiny_environment if compact else AlfworldEnvironment, games, key=key),
        prompt_template=ALFWORLD_COMPACT_PROMPT if compact else ALFWORLD_PROMPT,
        max_turns=15 if compact else 50,
        history_length=HISTORY_LENGTH,
        about=ABOUT,
        lower_case=True,
        columns=COLUMNS,
    )
