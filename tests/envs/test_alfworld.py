"""ALFWorld: generated games, the environment, and of the official games: are they all there, and as before?"""

import json
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from refusals import refused
from returning import check_played_again

from g2po_envs.alfworld import (
    OBJECT_TYPES,
    RECEPTACLE_TYPES,
    TASK_TYPES,
    AlfworldEnvironment,
    CorruptGameError,
    Manifest,
)
from g2po_envs.alfworld.engine import read_game
from g2po_envs.alfworld.games import SIZES, SPLITS, draw_room, generate_games, split_of_layout
from g2po_envs.alfworld.official import RECORD, RELEASE, Release, official_games, record
from g2po_envs.alfworld.planning import Planners
from g2po_envs.alfworld.vocabulary import HOLDS

HIDDEN = ("help", "look", "inventory")
NUMBER, MADE = 12, ("train", "held-out")
generate_tiny = partial(generate_games, size="tiny", num_workers=1, progress=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder and manifest of tiny games for training, and of held-out ones."""
    root = tmp_path_factory.mktemp("games")
    made = [(root / split, generate_tiny(root / split, split, NUMBER, seed=3, num_workers=2)) for split in MADE]
    return dict(zip(MADE, made))


@pytest.fixture
def manifest(made):
    return made["train"][1]


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
    drawn = {split: [] for split in SPLITS}
    for split, rooms in drawn.items():
        for number in range(60):
            kind = TASK_TYPES[number % len(TASK_TYPES)]
            rooms.append(draw_room(random.Random(f"{split}{number}"), split, size, kind))
        assert {split_of_layout(room.layout) for room in rooms} == {split}
    layouts = [{room.layout for room in rooms} for rooms in drawn.values()]
    assert len(set.union(*layouts)) == sum(map(len, layouts)), "no layout is in two splits"
    for room in sum(drawn.values(), []):
        least, most = SIZES[size].receptacles
        assert least <= len(room.receptacles) <= most
        assert {*room.receptacles.values()} <= {*RECEPTACLE_TYPES}
        for thing, place in room.objects.values():
            assert thing in OBJECT_TYPES
            assert thing == "DeskLamp" or thing in HOLDS[room.receptacles[place]]
    if size == "small":
        assert len({room.kind for room in sum(drawn.values(), [])}) == 4
        assert len({room.target for room in sum(drawn.values(), [])}) > 25


def test_the_arguments_alone_decide(made, tmp_path):
    _, manifest = made["train"]
    again = generate_tiny(tmp_path / "again", "train", NUMBER, seed=3)
    assert again.games.keys() == manifest.games.keys() and again.hash == manifest.hash
    fewer = generate_tiny(tmp_path / "fewer", "train", 3, seed=3)
    assert fewer.games.keys() < manifest.games.keys()
    other = generate_tiny(tmp_path / "fewer", "train", 3, seed=4)
    assert not other.games.keys() & manifest.games.keys()
    assert Manifest.scan(tmp_path / "fewer").hash == other.hash  # made with other arguments: replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "fewer"]


def test_made_games_are_found_again_and_damage_is_repaired(made, monkeypatch):
    folder, manifest = made["held-out"]
    make = partial(generate_tiny, folder, "held-out", NUMBER, seed=3)
    with monkeypatch.context() as patched:
        patched.setattr("g2po_envs.alfworld.games.Planners", None)  # would fail if anything were planned
        assert make().hash == manifest.hash
    next(folder.glob("*/*/game.tw-pddl")).unlink()
    assert make().hash == manifest.hash


def test_what_is_refused_and_files_are_kept(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("keep")
    for field, call in (
        ("split", partial(generate_games, "x", "test", 1)),
        ("size", partial(generate_games, "x", "train", 1, 0, "huge")),
        ("num_games", partial(generate_games, "x", "train", 0)),
        ("directory", partial(generate_games, ".", "train", 1)),
        ("directory", partial(Manifest.scan, tmp_path)),
        ("directory", partial(Manifest.scan, tmp_path / "missing")),
        ("hidden_actions", partial(AlfworldEnvironment, manifest, hidden_actions="help")),
        ("key", partial(AlfworldEnvironment, manifest, key="text")),
        ("task_id", partial(AlfworldEnvironment(manifest).reset, task_id="nope")),
    ):
        with refused(field):
            call()
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
    with pytest.raises(RuntimeError, match="planner process died"), Planners(2) as planners:
        for worker, _ in planners._workers:
            worker.kill()
        list(planners.solve({"pddl_domain": ""} for _ in range(8)))


# -- the environment --------------------------------------------------------------------------------------------------


def play(manifest, task_type, **options):
    """An environment, the first observation and the results of the walkthrough of the game of a type."""
    task_id = next(task_id for task_id, (kind, _) in manifest.games.items() if kind == task_type)
    environment = AlfworldEnvironment(manifest, **options)
    first = environment.reset(task_id=task_id, task_type=task_type)
    return environment, first, [environment.step(a) for a in read_game(manifest.path(task_id))["walkthrough"]]


def test_reset_gives_the_paper_s_first_observation_or_the_room_alone(manifest):
    of_a_pick = partial(play, manifest, "pick_and_place_simple")
    _, full, _ = of_a_pick()
    assert full.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert full.text.endswith(f"Your task is to: {full.task}.")
    _, brief, _ = of_a_pick(intro=False)
    assert brief.text.startswith("You are in the middle of a room.") and "task" not in brief.text
    assert (brief.task, brief.state_key) == (full.task, full.state_key)
    assert "help" not in full.admissible_actions and "look" in full.admissible_actions
    environment, first, _ = of_a_pick(hidden_actions=HIDDEN)
    assert not {action.split()[0] for action in first.admissible_actions} & {*HIDDEN}
    assert environment.step("inventory").observation.text.startswith("You are "), "hidden, but played"


def test_only_winning_pays_and_reset_starts_anew_and_leaves_the_process_as_it_was(manifest):
    arguments, output = sys.argv, sys.stdout
    (_, first, results), again = (play(manifest, "pick_two_obj_and_place", success_reward=3.0) for _ in "ab")
    assert again[1:] == (first, results)
    assert sys.argv is arguments and sys.stdout is output
    lost, won = [(0.0, False, False)], [(3.0, True, True)]
    assert [(r.reward, r.info["success"], r.terminated) for r in results] == lost * (len(results) - 1) + won


def test_ids_come_from_the_content_not_the_path(made, tmp_path):
    folder, manifest = made["train"]
    for number, path in enumerate(sorted(folder.glob("*/*"), reverse=True)):
        shutil.copytree(path, tmp_path / "elsewhere" / str(number))
    moved = Manifest.scan(tmp_path / "elsewhere")
    assert moved.rows() == manifest.rows() and moved.hash == manifest.hash
    assert [row["task_id"] for row in moved.rows()] == sorted(moved.games)


def test_unsolvable_games_are_counted_and_corrupt_ones_named(made, tmp_path):
    games = shutil.copytree(made["train"][0], tmp_path / "games")
    bad, corrupt = sorted(games.glob("*/*/game.tw-pddl"))[:2]
    bad.write_text(json.dumps(json.loads(bad.read_text()) | {"solvable": False}))
    manifest = Manifest.scan(games)
    assert manifest.skipped == {"unsolvable": 1} and len(manifest) == NUMBER - 1

    whole = json.loads(corrupt.read_text())
    for content in ("{", "[]", json.dumps({"grammar": ""})):
        corrupt.write_text(content)
        with pytest.raises(CorruptGameError, match=corrupt.parent.name):
            Manifest.scan(games)

    # Valid JSON that the engine cannot load; and a file that changes after the scan.
    corrupt.write_text(json.dumps(whole | {"pddl_problem": "(define (problem generated) (:domain alfred"}))
    manifest = Manifest.scan(games)
    task_id = next(task_id for task_id, (_, path) in manifest.games.items() if path == str(corrupt))
    for content in (corrupt.read_text(), json.dumps(whole)):
        corrupt.write_text(content)
        with pytest.raises(CorruptGameError, match=corrupt.parent.name):
            AlfworldEnvironment(manifest).reset(task_id=task_id)


def test_it_is_played_again(manifest):
    row = manifest.rows()[0]
    walkthrough = read_game(manifest.path(row["task_id"]))["walkthrough"]
    check_played_again(partial(AlfworldEnvironment, manifest), row, ["dance", *walkthrough])


# -- the official games, here a small release of generated ones -------------------------------------------------------


def change(root, release, known):
    """Change a game that the release knows, or another one."""
    train = Manifest.scan(root / RELEASE / "train")
    path = Path(train.path(next(game for game in train.games if (game in release.known["train"]) == known)))
    path.write_text(path.read_text().replace('"pddl_problem": "', '"pddl_problem": "\\n'))


FAULTS = {
    "a missing game": lambda root, _: shutil.rmtree(next(iter((root / RELEASE / "train").glob("*")))),
    "another known game": partial(change, known=True),
    "a change after the record": partial(change, known=False),
    "no games": lambda root, _: shutil.rmtree(root / RELEASE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_there_is_recorded_once_and_every_fault_is_refused(made, tmp_path, fault):
    known = {}
    for name, (folder, games) in zip(("train", "valid_seen"), made.values()):
        shutil.copytree(folder, tmp_path / RELEASE / name)
        known[name] = list(games.games)[:2]
    release = Release(dict.fromkeys(known, NUMBER), known)
    found = record(tmp_path, release)
    written = json.loads((tmp_path / RECORD).read_text())
    assert written == {name: found[name] for name in ("versions", "manifests")} and record(tmp_path, release) == found
    panel = official_games("valid_seen", tmp_path, release)
    assert len(panel) == NUMBER and panel.hash == written["manifests"]["valid_seen"]
    FAULTS[fault](tmp_path, release)
    with refused("directory"):
        official_games("train", tmp_path, release)
    with refused("split"):
        official_games("test", tmp_path, release)


def test_what_is_known_of_the_real_release():
    release = Release.load()
    assert release.numbers == {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
    assert len(release.known["train"]) == 120 and len(release.known["valid_seen"]) == 24
