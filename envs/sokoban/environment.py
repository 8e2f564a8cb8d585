"""Sokoban as a `TextEnvironment`: the observation is the grid, an action a direction."""

from __future__ import annotations

import random

from g2po_trl import Observation, StepResult, TextEnvironment
from g2po_trl.utils.options import require

from .drawing import LEGEND as COLOURS
from .drawing import picture
from .games import BOX, BOX_ON_GOAL, FLOOR, GOAL, PLAYER, PLAYER_ON_GOAL, WALL, Level, make_level
from .solver import MOVES, distances, move, possible_moves

LEGEND = (
    f"{WALL} wall, {FLOOR} floor, {GOAL} goal, {BOX} box, {BOX_ON_GOAL} box on a goal, {PLAYER} you, "
    f"{PLAYER_ON_GOAL} you on a goal"
)
POSITIONS = "you"  # begins the line that `positions` adds
_GOAL = "Push every box onto a goal. You can push one box at a time, and pull none."
TASK = f"{_GOAL} {LEGEND}."
IMAGE_TASK = f"{_GOAL} In the picture {COLOURS}."
RENDER = ("text", "image")


class SokobanEnvironment(TextEnvironment):
    """Levels of Sokoban; a solved one pays 10.

    The observation is the whole state, so equal observations of a level are one state. Moves that change nothing are
    not admissible, and can be played.

    Args:
        end_when_lost: end an episode as a failure as soon as no solution is left, by exact search. `False`: it goes
            on to the last turn, as a player would who does not notice.
        render: `"text"`: the grid as characters. `"image"`: as a picture, for vision-language models; the state key
            is the grid.
        positions: add a line that says the same in words: the player's row and column, and how many rows below and
            columns to the right of it inner walls, boxes and goals are, as "you+1+1 wall+0+2 box+1+0 goal+2+1".
            Tiny models cannot read a grid.
    """

    def __init__(self, end_when_lost: bool = False, positions: bool = False, render: str = "text"):
        require(render in RENDER, "render", render, f"set it to {' or '.join(RENDER)}")
        is_text = render == "text" or not positions
        require(is_text, "positions", positions, "the line would repeat what render='image' shows, leave it out")
        self.end_when_lost, self.positions, self.render = end_when_lost, positions, render

    def reset(self, size: str = "small", number: int = 0, level: str | None = None, **columns: object) -> Observation:
        """Return the start of a level.

        Args:
            size: see `make_level`.
            number: see `make_level`.
            level: a drawing, instead of a size and a number.
            columns: `task_id` and `task_type` of `level_rows`.

        Raises:
            ValueError: if there is no such size, or the drawing is not a level.
        """
        self.level = make_level(size, number) if level is None else Level.read(level)
        self.state = self.level.start
        return self.observe()

    def observe(self) -> Observation:
        """Return what is seen in the current state."""
        moves = possible_moves(self.level.floor, self.state)
        text = self.level.draw(self.state)
        if self.render == "image":
            return Observation("", text, moves, IMAGE_TASK, images=[picture(text)])
        if self.positions:
            text += f"\n{self.in_words()}"
        return Observation(text, admissible_actions=moves, task=TASK)

    def in_words(self) -> str:
        """Return the line of `positions` for the current state."""
        (row, column), boxes = self.state
        inner = range(1, self.level.side - 1)
        walls = [(r, c) for r in inner for c in inner if (r, c) not in self.level.floor]
        things = (("wall", walls), ("box", sorted(boxes)), ("goal", sorted(self.level.goals)))
        near = [f"{kind}{r - row:+d}{c - column:+d}" for kind, cells in things for r, c in cells]
        return " ".join([f"{POSITIONS}{row:+d}{column:+d}", *near])

    def step(self, action: str) -> StepResult:
        if action in MOVES:
            self.state = move(self.level.floor, self.state, action)
        solved = self.state[1] == self.level.goals
        lost = self.end_when_lost and not solved and self.distance() is None
        info = {"success": False, "failure_reason": "no solution is left"} if lost else {}
        return StepResult(self.observe(), reward=10.0 if solved else 0.0, terminated=solved or lost, info=info)

    def distance(self) -> int | None:
        """Return the smallest number of moves to a solution, or `None` if there is none."""
        return distances(self.level.floor, self.level.goals).get(self.state)


def distance_of(observation: str) -> int | None:
    """Return the smallest number of moves from a drawn state to a solution, or `None` if there is none.

    With it an `advantage_fn` can compare estimated values with the exact ones.

    Raises:
        ValueError: if the text is not a drawing of a state.
    """
    level = Level.read(observation.partition(f"\n{POSITIONS}")[0])
    return distances(level.floor, level.goals).get(level.start)


def expert(environment: SokobanEnvironment) -> str:
    """Return a move of a shortest solution; where none is left, the first admissible move."""
    floor, known = environment.level.floor, distances(environment.level.floor, environment.level.goals)
    options = possible_moves(floor, environment.state)
    return min(options, key=lambda direction: known.get(move(floor, environment.state, direction), len(known)))


def limited_expert(environment: SokobanEnvironment, rng: random.Random) -> str:
    """Return a move of a shortest solution beside a box; elsewhere any move.

    It sees no further than a step, and wanders until it meets a box: the way there is left for reinforcement learning.
    """
    (row, column), boxes = environment.state
    if any(abs(row - r) + abs(column - c) == 1 for r, c in boxes):
        return expert(environment)
    return rng.choice(possible_moves(environment.level.floor, environment.state))
