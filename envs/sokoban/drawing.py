"""Sokoban's grid as a picture of plain squares."""

from __future__ import annotations

import numpy as np

from .games import BOX, BOX_ON_GOAL, FLOOR, GOAL, PLAYER, PLAYER_ON_GOAL, WALL

SQUARE = 28  # pixels: vision-language models read squares of 28 or 32 pixels as one token
_WALL, _FLOOR, _GOAL, _BOX, _YOU = (70, 70, 70), (235, 235, 225), (220, 50, 50), (160, 100, 40), (40, 90, 220)
# What fills a cell, and what lies inside of it.
_COLOURS = {
    WALL: (_WALL, _WALL),
    FLOOR: (_FLOOR, _FLOOR),
    GOAL: (_FLOOR, _GOAL),
    BOX: (_FLOOR, _BOX),
    BOX_ON_GOAL: (_GOAL, _BOX),
    PLAYER: (_FLOOR, _YOU),
    PLAYER_ON_GOAL: (_GOAL, _YOU),
}
LEGEND = (
    "grey squares are walls, red ones goals, brown ones boxes, the blue one is you; on a goal they have a red edge"
)


def picture(drawing: str) -> np.ndarray:
    """Return a drawn state as an array of uint8, (height, width, 3)."""
    cells = [line.split(" ") for line in drawing.splitlines()]
    edge = SQUARE // 5
    squares = np.zeros((len(cells), len(cells[0]), SQUARE, SQUARE, 3), np.uint8)
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            square = squares[row, column]
            square[:], square[edge:-edge, edge:-edge] = _COLOURS[cell]
    return squares.swapaxes(1, 2).reshape(len(cells) * SQUARE, -1, 3)
