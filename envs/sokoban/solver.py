"""Moves of Sokoban and the exact number of them to a solution, by breadth-first search.

A state is `(player, boxes)`: a cell, and a frozen set of cells. A cell is `(row, column)`.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell]]

MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def move(floor: frozenset[Cell], state: State, direction: str) -> State:
    """Return the state after a move; the same one if a wall or a second box is in the way."""
    (row, column), boxes = state
    down, right = MOVES[direction]
    ahead, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if ahead not in floor:
        return state
    if ahead not in boxes:
        return ahead, boxes
    if behind not in floor or behind in boxes:
        return state
    return ahead, boxes - {ahead} | {behind}


def possible_moves(floor: frozenset[Cell], state: State) -> list[str]:
    """Return the directions that change the state."""
    return [direction for direction in MOVES if move(floor, state, direction) != state]


@lru_cache(maxsize=64)
def distances(floor: frozenset[Cell], goals: frozenset[Cell]) -> dict[State, int]:
    """Return, for every state that can be solved, the smallest number of moves to a state with all boxes on goals.

    States that are missing cannot be solved. The search goes backwards from the solved states, by pulling: a room of
    25 cells has 25 x 24 states with one box and 25 x 276 with two.

    Args:
        floor: cells that are not walls.
        goals: where the boxes belong, as many as there are boxes.
    """
    solved: list[State] = [(cell, goals) for cell in floor - goals]
    found = dict.fromkeys(solved, 0)
    queue = deque(solved)
    while queue:
        state = queue.popleft()
        for before in _states_before(floor, state):
            if before not in found:
                found[before] = found[state] + 1
                queue.append(before)
    return found


def _states_before(floor: frozenset[Cell], state: State) -> list[State]:
    """Return the states from which one move leads to this one."""
    (row, column), boxes = state
    found = []
    for down, right in MOVES.values():
        start = (row - down, column - right)
        if start not in floor or start in boxes:
            continue
        found.append((start, boxes))
        pushed = (row + down, column + right)
        if pushed in boxes:
            found.append((start, boxes - {pushed} | {(row, column)}))
    return found
