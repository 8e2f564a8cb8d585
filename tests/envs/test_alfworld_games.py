"""The generator of ALFWorld games."""

import json
import random
import subprocess
import sys

import pytest

pytest.importorskip("alfworld")

from refusals import refused

from g2po_envs.alfworld import OBJECT_TYPES, RECEPTACLE_TYPES, TASK_TYPES, AlfworldEnvironment, Manifest
from g2po_envs.alfworld.engine import read_game
from g2po_envs.alfworld.games import SIZES, SPLITS, draw_room, generate_games, split_of_layout
from g2po_envs.alfworld.vocabulary import HOLDS

NUMBER = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder and manifest of tiny games for training, and of held-out ones."""
    root = tmp_path_factory.mktemp("games")
    return {
        split: (root / split, generate_games(root / split, split, NUMBER, seed=3, size="tiny", num_workers=2))
        for split in ("train", "held-out")
    }


def test_all_task_types_and_every_walkthrough_wins(made):
    for _, manifest in made.values():
        rows = manifest.rows()
        assert len(rows) == NUMBER and manifest.skipped == {}
        assert {row["task_type"] for row in rows} == set(TASK_TYPES)
        environment = AlfworldEnvironment(manifest)
        for row in rows:
            seen = environment.reset(**row)
            assert seen.task and not any(sign in seen.task for sign in "{}#_.") and seen.task.islower()
            assert 4 <= sum(action.startswith("go to ") for action in seen.admissible_actions) <= 5
            walkthrough = read_game(manifest.path(row["task_id"]))["walkthrough"]
            assert len(walkthrough) >= 3, "no task is done at the start"
            for action in walkthrough:
                result = environment.step(action)
            assert result.terminated and result.info["success"]


@pytest.mark.parametrize("size", SIZES)
def test_rooms_are_as_large_as_said_and_disjoint_between_splits(size):
    drawn = {
        split: [
            draw_room(random.Random(f"{split}{i}"), split, size, TASK_TYPES[i % len(TASK_TYPES)]) for i in range(60)
        ]
        for split in SPLITS
    }
    layouts = {split: {room.layout for room in rooms} for split, rooms in drawn.items()}
    assert not layouts["train"] & layouts["held-out"]
    assert not layouts["train"] & layouts["validation"]
    assert not layouts["validation"] & layouts["held-out"]
    for split, found in layouts.items():
        assert {split_of_layout(layout) for layout in found} == {split}
    for room in sum(drawn.values(), []):
        low, high = SIZES[size].receptacles
        assert low <= len(room.receptacles) <= high
        assert {*room.receptacles.values()} <= {*RECEPTACLE_TYPES}
        for thing, place in room.objects.values():
            assert thing in OBJECT_TYPES
            assert thing == "DeskLamp" or thing in HOLDS[room.receptacles[place]]
    if size == "small":
        assert len({room.kind for room in sum(drawn.values(), [])}) == 4
        assert len({room.target for room in sum(drawn.values(), [])}) > 25


def test_the_arguments_alone_decide(made, tmp_path):
    _, manifest = made["train"]
    again = generate_games(tmp_path / "again", "train", NUMBER, seed=3, size="tiny", num_workers=1, progress=False)
    assert again.games.keys() == manifest.games.keys() and again.hash == manifest.hash
    fewer = generate_games(tmp_path / "fewer", "train", 3, seed=3, size="tiny", num_workers=1, progress=False)
    assert fewer.games.keys() < manifest.games.keys()
    other = generate_games(tmp_path / "fewer", "train", 3, seed=4, size="tiny", num_workers=1, progress=False)
    assert not other.games.keys() & manifest.games.keys()
    assert Manifest.scan(tmp_path / "fewer").hash == other.hash  # made with other arguments: replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "fewer"]


def test_made_games_are_found_again_and_damage_is_repaired(made, monkeypatch):
    folder, manifest = made["held-out"]

    def make():
        return generate_games(folder, "held-out", NUMBER, seed=3, size="tiny", num_workers=1, progress=False)

    with monkeypatch.context() as patched:
        patched.setattr("g2po_envs.alfworld.games.Planners", None)  # would fail if anything were planned
        assert make().hash == manifest.hash
    next(folder.glob("*/*/game.tw-pddl")).unlink()
    assert make().hash == manifest.hash


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("split", ("x", "test", 1)),
        ("size", ("x", "train", 1, 0, "huge")),
        ("num_games", ("x", "train", 0)),
        ("directory", (".", "train", 1)),
    ],
)
def test_bad_arguments_are_refused_and_files_kept(tmp_path, monkeypatch, field, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("keep")
    with refused(field):
        generate_games(*arguments)
    assert [path.name for path in tmp_path.rglob("*")] == ["notes.txt"]


def test_command_line_makes_a_full_kitchen_that_official_tools_can_read(tmp_path):
    command = [sys.executable, "-m", "g2po_envs.alfworld.games", str(tmp_path / "out")]
    options = ["--split", "validation", "--num-games", "2", "--size", "full", "--seed", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 games" in done.stdout and Manifest.scan(tmp_path / "out").hash in done.stdout
    for path in (tmp_path / "out").glob("*/*/game.tw-pddl"):
        assert json.loads((path.parent / "traj_data.json").read_text())["task_type"] in TASK_TYPES
        game = json.loads(path.read_text())
        assert game["solvable"] is True
        assert game["pddl_problem"].count("(receptacleType ") >= SIZES["full"].receptacles[0]


def test_a_killed_planner_is_an_error_and_not_a_hang():
    from g2po_envs.alfworld.planning import Planners

    with pytest.raises(RuntimeError, match="planner process died"), Planners(2) as planners:
        for worker, _ in planners._workers:
            worker.kill()
        list(planners.solve({"pddl_domain": ""} for _ in range(8)))
