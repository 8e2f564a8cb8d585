"""Sokoban: moves by hand, distances by another search, levels by number, and an expert who solves them."""

from collections import deque

import pytest

from g2po_envs.sokoban import SIZES, Level, SokobanEnvironment, distance_of, distances, expert, level_rows, make_level
from g2po_envs.sokoban.games import turned
from g2po_envs.sokoban.solver import MOVES, move
from g2po_trl import EnvironmentPool, Observation, PoolLimits

ROOM = """
# # # # #
# p x o #
# _ _ _ #
# _ _ _ #
# # # # #
"""


def played(directions, text=ROOM):
    environment = SokobanEnvironment()
    environment.reset(level=text)
    return [environment.step(direction) for direction in directions.split()]


def test_a_box_is_pushed_onto_its_goal():
    (result,) = played("right")
    assert result.terminated and result.reward == 10.0
    assert result.observation.text.splitlines()[1] == "# _ p * #"


def test_walls_and_second_boxes_stop_a_push():
    pushed = "# # # # #\n# p x x #\n# o o _ #\n# _ _ _ #\n# # # # #"
    assert played("right up left", pushed)[-1].observation.text == pushed
    (result,) = played("sing", pushed)
    assert result.observation.text == pushed and not result.terminated
    assert result.observation.admissible_actions == ["down"]


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
    corner = "# # # # #\n# x _ o #\n# p _ _ #\n# _ _ _ #\n# # # # #"
    assert distance_of(corner) is None
    environment = SokobanEnvironment(end_when_lost=True)
    environment.reset(level="# # # # #\n# _ x o #\n# _ _ p #\n# _ _ _ #\n# # # # #")
    assert environment.distance() == 4
    goes_on = [environment.step(one) for one in ("left", "up")]
    assert not any(result.terminated for result in goes_on), "up pushes the box against the wall: nothing moves"
    ends = [environment.step(one) for one in ("right", "up", "left")][-1]
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


def symmetries(drawing):
    """The eight drawings of a level, by transposing and reversing rows."""
    rows = [row.split() for row in drawing.splitlines()]
    found = set()
    for grid in (rows, list(map(list, zip(*rows)))):
        for up in (grid, grid[::-1]):
            for cells in (up, [row[::-1] for row in up]):
                found.add("\n".join(" ".join(row) for row in cells))
    return found


def test_levels_of_training_and_evaluation_differ_however_they_are_turned():
    train = [make_level(row["size"], row["number"]).draw() for row in level_rows("tiny", 200)]
    held_out = [make_level(row["size"], row["number"]).draw() for row in level_rows("tiny", 30, held_out=True)]
    assert len(set(train)) == 200 and len(set(held_out)) == 30
    assert not {one for drawing in held_out for one in symmetries(drawing)} & set(train)
    with pytest.raises(ValueError, match="size"):
        level_rows("tiny", 400, held_out=True)


def test_a_turned_level_is_played_by_turned_moves():
    environment, other = SokobanEnvironment(), SokobanEnvironment()
    for turns, mirror in ((1, False), (3, True), (0, True)):
        start = environment.reset(size="small", number=7)
        drawing, names = turned(start.text, {one: one for one in MOVES}, turns, mirror)
        assert drawing in symmetries(start.text)
        other.reset(level=drawing)
        for _ in range(make_level("small", 7).moves):
            chosen = expert(environment)
            result, same = environment.step(chosen), other.step(names[chosen])
            assert turned(result.observation.text, {}, turns, mirror)[0] == same.observation.text
        assert same.terminated


@pytest.mark.parametrize(
    "text, message",
    [
        ("# ? #\n# p #\n# # #", r"the level has \['\?'\]"),
        ("# # #\n# p #", "2 rows of"),
        ("# # #\n# p #\n# # #", "1 players, 0 boxes and 0 goals"),
    ],
)
def test_drawings_that_are_no_level_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Level.read(text)


def test_sizes_are_named():
    with pytest.raises(ValueError, match="size"):
        make_level("huge", 0)


def test_workers_play_it():
    rows = level_rows("tiny", 3)
    with EnvironmentPool(SokobanEnvironment, PoolLimits(2)) as pool:
        seen = pool.reset(rows, range(len(rows)))
        assert all(isinstance(one, Observation) for one in seen)
        assert [one.text for one in seen] == [make_level("tiny", row["number"]).draw() for row in rows]
