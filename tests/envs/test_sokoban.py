"""Sokoban: moves by hand, distances by another search, levels by number, and an expert who solves them."""

from collections import deque

import numpy as np
import pytest
from refusals import refused

from g2po_envs.sokoban import SIZES, Level, SokobanEnvironment, distance_of, distances, expert, level_rows, make_level
from g2po_envs.sokoban.exact import ExactAdvantage
from g2po_envs.sokoban.games import turned
from g2po_envs.sokoban.solver import MOVES, move
from g2po_envs.sokoban.tiny import tiny_environment
from g2po_trl import StateGraph, Step, Trajectory

ROOM = "# # # # #\n# p x o #\n# _ _ _ #\n# # # # #\n# # # # #"


def opened(text=ROOM, **options):
    environment = SokobanEnvironment(**options)
    environment.reset(level=text)
    return environment


def forward_distance(level, start):
    """By searching forwards from one state."""
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        state, moves = queue.popleft()
        if state[1] == level.goals:
            return moves
        for direction in MOVES:
            after = move(level.floor, state, direction)
            if after not in seen:
                seen.add(after)
                queue.append((after, moves + 1))
    return None


@pytest.mark.parametrize("size, number", [("tiny", 0), ("tiny", 1), ("small", 2), ("medium", 0)])
def test_distances_are_those_of_a_forward_search(size, number):
    level = make_level(size, number)
    known = distances(level.floor, level.goals)
    around = {level.start} | {move(level.floor, level.start, one) for one in MOVES}
    around |= {move(level.floor, state, one) for state in list(around) for one in MOVES}
    for state in around:
        assert known.get(state) == forward_distance(level, state) == distance_of(level.draw(state))
    assert level.moves == known[level.start]


def test_a_box_in_a_corner_is_lost():
    environment = opened("# # # # #\n# _ x o #\n# _ _ p #\n# _ _ _ #\n# # # # #", end_when_lost=True)
    *goes_on, ends = [environment.step(one) for one in ("left", "up", "right", "up", "left")]
    assert not any(result.terminated for result in goes_on), "up pushes the box against the wall: nothing moves"
    assert ends.terminated and ends.reward == 0.0 and ends.info["failure_reason"] == "no solution is left"


@pytest.mark.parametrize("size", SIZES)
def test_levels_are_as_their_size_says_and_the_expert_solves_them(size):
    wanted = SIZES[size]
    for number in range(6):
        level = make_level(size, number)
        make_level.cache_clear()
        assert level == make_level(size, number) == Level.read(level.draw())
        assert wanted.least <= level.moves <= wanted.most and len(level.goals) == wanted.boxes
        assert len(level.floor) == (wanted.side - 2) ** 2 - wanted.walls and not level.start[1] & level.goals
        environment = SokobanEnvironment()
        environment.reset(size=size, number=number)
        results = [environment.step(expert(environment)) for _ in range(level.moves)]
        assert [result.terminated for result in results] == [False] * (level.moves - 1) + [True]


def test_levels_of_training_and_evaluation_differ_however_they_are_turned():
    def levels(number, held_out):
        rows = level_rows("tiny", number, held_out=held_out)
        return [make_level(row["size"], row["number"]).draw() for row in rows]

    ways = [(turns, is_mirrored) for turns in range(4) for is_mirrored in (False, True)]
    train = set(levels(200, False))
    symmetries = {turned(drawing, {}, *way)[0] for drawing in levels(30, True) for way in ways}
    assert len(train) == 200 and len(symmetries) > 60 and not symmetries & train


def test_exact_distances_as_values():
    rows, environment, episodes = [{"level": ROOM}], opened(), []
    for moves in ("right", "down up right", "down right down down"):
        seen, steps = environment.reset(level=ROOM), []
        for name in moves.split():
            steps.append(Step(seen.text, name))
            result = environment.step(name)
            seen = result.observation
        outcome = "success" if result.terminated else "truncated"
        episodes.append(Trajectory("one", steps, result.reward, outcome))
    graph = StateGraph.from_groups([episodes], gamma=0.5)
    told = []
    ExactAdvantage(rows, estimator=lambda exact: told.append(exact) or np.zeros(exact.num_steps))(graph)
    assert told[0].node_values.tolist() == [5.0, 2.5, 1.25, 10.0, 10.0, 0.0]
    assert graph.node_values[:2].tolist() != [5.0, 2.5], "mean returns differ"
    assert np.isfinite(ExactAdvantage(rows)(graph)).all()
    with refused("rows"):  # its states would be worth 0
        ExactAdvantage(rows, tiny_environment())(graph)
