"""Levels by number: random rooms whose start is as far from solved as the size asks."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.options import require

from .solver import Cell, State, distances

WALL, FLOOR, GOAL, BOX, BOX_ON_GOAL, PLAYER, PLAYER_ON_GOAL = "#", "_", "o", "x", "*", "p", "P"
_TRIES = 1000
_QUARTER_TURN = {"up": "right", "right": "down", "down": "left", "left": "up"}
_MIRRORED = {"up": "up", "down": "down", "left": "right", "right": "left"}


@dataclass(frozen=True)
class Size:
    """What levels of a size are like.

    Args:
        side: rows and columns, with the walls around.
        boxes: number of boxes.
        walls: inner cells that are walls.
        least, most: moves of the shortest solution.
    """

    side: int
    boxes: int
    walls: int
    least: int
    most: int


SIZES = {
    "tiny": Size(side=5, boxes=1, walls=1, least=2, most=8),
    "small": Size(side=6, boxes=1, walls=3, least=4, most=14),
    "medium": Size(side=7, boxes=2, walls=5, least=8, most=24),
    "large": Size(side=8, boxes=2, walls=9, least=12, most=36),
}


@dataclass(frozen=True)
class Level:
    """A level: cells that are not walls, goals, and the start.

    Args:
        side: rows and columns.
        floor: cells that are not walls.
        goals: where the boxes belong.
        start: the player and the boxes.
    """

    side: int
    floor: frozenset[Cell]
    goals: frozenset[Cell]
    start: State

    @property
    def moves(self) -> int:
        """Moves of the shortest solution."""
        return distances(self.floor, self.goals)[self.start]

    def draw(self, state: State | None = None) -> str:
        """Return a state (default: the start) as rows of characters, with a space between two."""
        player, boxes = self.start if state is None else state
        rows = []
        for row in range(self.side):
            cells = []
            for column in range(self.side):
                cell = (row, column)
                on_goal = cell in self.goals
                if cell not in self.floor:
                    cells.append(WALL)
                elif cell == player:
                    cells.append(PLAYER_ON_GOAL if on_goal else PLAYER)
                elif cell in boxes:
                    cells.append(BOX_ON_GOAL if on_goal else BOX)
                else:
                    cells.append(GOAL if on_goal else FLOOR)
            rows.append(" ".join(cells))
        return "\n".join(rows)

    @classmethod
    def read(cls, text: str) -> Level:
        """Return the level whose start is drawn, in rows of equal length; spaces are left out.

        Raises:
            G2POError: if it is not a drawing of a level.
        """
        rows = [row.replace(" ", "") for row in text.strip().splitlines()]
        cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
        known = {WALL, FLOOR, GOAL, BOX, BOX_ON_GOAL, PLAYER, PLAYER_ON_GOAL}
        require(known >= set(cells.values()), "level", text, f"use {' '.join(sorted(known))} alone")
        require(all(len(row) == len(rows) for row in rows), "level", text, "draw a square")
        players = [cell for cell, mark in cells.items() if mark in (PLAYER, PLAYER_ON_GOAL)]
        boxes = frozenset(cell for cell, mark in cells.items() if mark in (BOX, BOX_ON_GOAL))
        goals = frozenset(cell for cell, mark in cells.items() if mark in (GOAL, BOX_ON_GOAL, PLAYER_ON_GOAL))
        is_playable = len(players) == 1 and 0 < len(boxes) == len(goals)
        require(is_playable, "level", text, "draw one player, and as many goals as boxes")
        floor = frozenset(cell for cell, mark in cells.items() if mark != WALL)
        return cls(len(rows), floor, goals, (players[0], boxes))


@lru_cache(maxsize=256)
def make_level(size: str, number: int) -> Level:
    """Return a level, the same one for the same size and number.

    Raises:
        G2POError: if there is no such size.
    """
    require(size in SIZES, "size", size, f"choose one of {', '.join(SIZES)}")
    wanted, rng = SIZES[size], random.Random(f"sokoban-{size}-{number}")
    inner = [(row, column) for row in range(1, wanted.side - 1) for column in range(1, wanted.side - 1)]
    for _ in range(_TRIES):
        floor = frozenset(rng.sample(inner, len(inner) - wanted.walls))
        goals = frozenset(rng.sample(sorted(floor), wanted.boxes))
        known = distances(floor, goals)
        starts = sorted(
            (state for state, moves in known.items() if wanted.least <= moves <= wanted.most and not state[1] & goals),
            key=lambda state: (state[0], sorted(state[1])),
        )
        if starts:
            return Level(wanted.side, floor, goals, rng.choice(starts))
    raise AssertionError(f"no level of size {size} in {_TRIES} rooms")  # sizes are chosen so that there are many


def turned(drawing: str, directions: dict[str, str], turns: int, mirror: bool) -> tuple[str, dict[str, str]]:
    """Return a drawing turned by some quarters and mirrored, and what its directions are called then."""
    rows = [row.split() for row in drawing.splitlines()]
    for _ in range(turns):
        rows = [list(row) for row in zip(*rows[::-1])]
        directions = {one: _QUARTER_TURN[other] for one, other in directions.items()}
    if mirror:
        rows = [row[::-1] for row in rows]
        directions = {one: _MIRRORED[other] for one, other in directions.items()}
    return "\n".join(" ".join(row) for row in rows), directions


def is_held_out(drawing: str) -> bool:
    """Return whether a level is for evaluation: one in eight, and with it all that are the same turned or mirrored."""
    alike = (turned(drawing, {}, turns, mirror)[0] for turns in range(4) for mirror in (False, True))
    return zlib.crc32(min(alike).encode()) % 8 == 0


def level_rows(size: str, number: int, held_out: bool = False, first: int = 0) -> list[dict[str, Any]]:
    """Return tasks, their columns the arguments of `SokobanEnvironment.reset`; no level comes twice.

    Args:
        size: of the levels.
        number: how many.
        held_out: levels for evaluation, of which none is one of training, not even turned or mirrored.
        first: the number to begin with.

    Raises:
        G2POError: if there is no such size, or it has too few levels.
    """
    require(number >= 1, "number", number, "set it to at least 1")
    seen, rows = set(), []
    for one in range(first, first + 20 * number + 200):
        drawing = make_level(size, one).draw()
        if drawing not in seen and is_held_out(drawing) == held_out:
            seen.add(drawing)
            rows.append({"task_id": f"{size}-{one}", "size": size, "number": one, "task_type": size})
        if len(rows) == number:
            return rows
    remedy = f"it has only {len(rows)} of {number} different levels, choose a larger one"
    raise G2POError(f"size is {size!r}: {remedy}", "size", size)
