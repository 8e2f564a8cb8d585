"""Panels for `g2po evaluate --environment sokoban`."""

from __future__ import annotations

from functools import partial

from g2po_envs.sokoban.environment import SokobanEnvironment
from g2po_envs.sokoban.games import SIZES, level_rows
from g2po_envs.sokoban.prompts import PROMPTS
from g2po_envs.sokoban.tiny import HISTORY_LENGTH, MAX_TURNS
from g2po_trl.evaluation.panel import Panel, check_selection

ABOUT = """You play Sokoban: a grid with walls, boxes and goals. You move up, down, left or right, and push a box by \
walking into it. You can push one box at a time, never pull, and a box in a corner is stuck. The level is solved when \
every box is on a goal."""


def load_panel(
    name: str = "small",
    number: int = 192,
    skip: int = 0,
    compact: bool = False,
    positions: bool | None = None,
    end_when_lost: bool = False,
    render: str = "text",
) -> Panel:
    """Return held-out levels of a size.

    Args:
        name: the size, see `make_level`.
        number: number of levels.
        skip: number of preceding levels to skip, e.g. levels that selected a checkpoint.
        compact: use the tiny model's setting.
        positions: see `SokobanEnvironment`. `None`: as `compact`.
        end_when_lost: see `SokobanEnvironment`.
        render: see `SokobanEnvironment`.

    Raises:
        G2POError: if there is no such size, or it has too few levels.
    """
    check_selection(number, skip)
    rows = level_rows(name, skip + number, held_out=True)[skip:]
    return Panel(
        name=f"Sokoban {name}",
        rows=rows,
        environment_factory=partial(
            SokobanEnvironment,
            end_when_lost=end_when_lost,
            positions=compact if positions is None else positions,
            render=render,
        ),
        prompt_template=PROMPTS["compact" if compact else "full"],
        max_turns=MAX_TURNS if compact else SIZES[name].most + 6,
        history_length=HISTORY_LENGTH if compact else 2,
        about=ABOUT,
        lower_case=True,
        data=f"levels {rows[0]['number']} to {rows[-1]['number']}",
    )
