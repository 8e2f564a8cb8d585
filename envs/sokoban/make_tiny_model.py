"""Make the tiny model: `python -m g2po_envs.sokoban.make_tiny_model --output FOLDER`.

Levels -> a walker who pushes well and walks at random -> tokenizer -> supervised fine-tuning (`g2po_envs.tiny`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import random
from collections.abc import Iterable
from dataclasses import replace

from transformers import Qwen2Tokenizer

from g2po_envs.sokoban.environment import TASK
from g2po_envs.sokoban.levels import (
    BOX,
    BOX_ON_GOAL,
    FLOOR,
    GOAL,
    PLAYER,
    PLAYER_ON_GOAL,
    WALL,
    Level,
    level_rows,
    make_level,
    turned,
)
from g2po_envs.sokoban.prompts import SOKOBAN_COMPACT_PROMPT
from g2po_envs.sokoban.solver import MOVES, State, distances, move, possible_moves
from g2po_envs.sokoban.tiny import HISTORY_LENGTH
from g2po_envs.tiny.commands import make_model
from g2po_envs.tiny.demonstration import Demonstration
from g2po_envs.tiny.tokenizer import train_tokenizer
from g2po_envs.tiny.training import Course, Phase, Recipe

FIRST_LEVEL = 1_000_000  # not the training recipe's: other levels
# A cell with the space before it is one token; a row begins with a wall.
CELLS = tuple(f" {mark}" for mark in (WALL, FLOOR, GOAL, BOX, BOX_ON_GOAL, PLAYER, PLAYER_ON_GOAL))


def push_or_wander(level: Level, state: State, rng: random.Random) -> str:
    """Return a push of a shortest solution, where there is one; otherwise any move that pushes nothing."""
    known = distances(level.floor, level.goals)
    options = possible_moves(level.floor, state)
    after = {direction: move(level.floor, state, direction) for direction in options}
    pushes = [direction for direction in options if after[direction][1] != state[1]]
    if state in known:
        good = [direction for direction in pushes if known.get(after[direction]) == known[state] - 1]
        if good:
            return rng.choice(good)
    return rng.choice([direction for direction in options if direction not in pushes] or options)


def make_demonstrations(num_levels: int = 4000, turns: int = 24, seed: int = 0) -> list[Demonstration]:
    """Return the walker's moves; one in ten moves that are played is any other, so that pushes go wrong too."""
    rng, shown = random.Random(f"{seed}-sokoban"), []
    rows = level_rows("tiny", num_levels // 16, first=FIRST_LEVEL)
    rows += level_rows("small", num_levels - len(rows), first=FIRST_LEVEL)
    for row in rows:
        level = make_level(row["size"], row["number"])
        state = level.start
        for turn in range(turns):
            chosen, options = push_or_wander(level, state, rng), possible_moves(level.floor, state)
            shown.append(Demonstration(TASK, level.draw(state), options, (), turn, chosen))
            state = move(level.floor, state, rng.choice(options) if rng.random() < 0.1 else chosen)
            if state[1] == level.goals:
                break
    return shown


def vary(shown: Demonstration, rng: random.Random) -> Demonstration:
    """Return the demonstration in a grid that is turned and mirrored at random."""
    drawing, directions = turned(shown.observation, {one: one for one in MOVES}, rng.randrange(4), rng.random() < 0.5)
    actions = [directions[action] for action in shown.actions]
    return replace(shown, observation=drawing, actions=actions, expert=directions[shown.expert])


COURSE = Course(SOKOBAN_COMPACT_PROMPT, HISTORY_LENGTH, vary)
RECIPE = Recipe((Phase("act", 4000, 2e-3),), vocab_size=384)


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Return a tokenizer with one token per cell and direction."""
    return train_tokenizer(texts, vocab_size, list(MOVES), (f"\n{WALL}", *CELLS))


if __name__ == "__main__":
    make_model(__doc__, COURSE, make_tokenizer, RECIPE, make_demonstrations)
