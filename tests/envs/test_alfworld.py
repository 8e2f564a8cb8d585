"""ALFWorld: generated games, the environment, and of the official games: are they all there, and as before?"""

import json
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from refusals import refused
from returning import check_played_again

from g2po_envs.alfworld import TASK_TYPES, AlfworldEnvironment, CorruptGameError, Manifest
from g2po_envs.alfworld.engine import read_game
from g2po_envs.alfworld.games import SIZES, SPLITS, draw_room, generate_games, split_of_layout
from g2po_envs.alfworld.official import RECORD, RELEASE, Release, official_games, record
from g2po_envs.alfworld.vocabulary import HOLDS

HIDDEN = ("help", "look", "inventory")
NUMBER, MADE = 6, ("train", "held-out")
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
    least, most = SIZES[size].receptacles
    layouts = set()
    for split in SPLITS:
        for number in range(60):
            kind = TASK_TYPES[number % len(TASK_TYPES)]
            room = draw_room(random.Random(f"{split}{number}"), split, size, kind)
            assert split_of_layout(room.layout) == split
            assert least <= len(room.receptacles) <= most
            for thing, place in room.objects.values():
                assert thing == "DeskLamp" or thing in HOLDS[room.receptacles[place]]
            layouts.add(room.layout)
    assert len(layouts) > 100


def test_the_arguments_alone_decide_and_damage_is_repaired(made, tmp_path):
    folder, manifest = made["train"]
    again = generate_tiny(tmp_path / "games", "train", 3, seed=3)
    assert again.games.keys() < manifest.games.keys()
    next(folder.glob("*/*/game.tw-pddl")).unlink()
    assert generate_tiny(folder, "train", NUMBER, seed=3).hash == manifest.hash
    other = generate_tiny(tmp_path / "games", "train", 3, seed=4)
    assert not other.games.keys() & manifest.games.keys()
    assert Manifest.scan(tmp_path / "games").hash == other.hash, "made with other arguments: replaced"


def test_what_is_refused_and_files_are_kept(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("keep")
    for field, call in (
        ("split", partial(generate_games, "x", "test", 1)),
        ("directory", partial(generate_games, ".", "train", 1)),
        ("directory", partial(Manifest.scan, tmp_path)),
        ("key", partial(AlfworldEnvironment, manifest, key="text")),
        ("task_id", partial(AlfworldEnvironment(manifest).reset, task_id="nope")),
    ):
        with refused(field):
            call()
    assert [path.name for path in tmp_path.rglob("*")] == ["notes.txt"]


# -- the environment --------------------------------------------------------------------------------------------------


def play(manifest, **options):
    """An environment, the first observation and the results of the walkthrough of a game."""
    task_id = next(task_id for task_id, (kind, _) in manifest.games.items() if kind == "pick_and_place_simple")
    environment = AlfworldEnvironment(manifest, **options)
    first = environment.reset(task_id=task_id)
    return environment, first, [environment.step(a) for a in read_game(manifest.path(task_id))["walkthrough"]]


def test_it_starts_and_pays_as_in_the_paper_and_leaves_the_process_as_it_was(manifest):
    arguments, output = sys.argv, sys.stdout
    (_, full, results), again = (play(manifest, success_reward=3.0) for _ in "ab")
    assert again[1:] == (full, results), "reset starts anew"
    assert sys.argv is arguments and sys.stdout is output
    assert full.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert full.text.endswith(f"Your task is to: {full.task}.")
    lost, won = [(0.0, False, False)], [(3.0, True, True)]
    assert [(r.reward, r.info["success"], r.terminated) for r in results] == lost * (len(results) - 1) + won
    environment, brief, _ = play(manifest, intro=False, hidden_actions=HIDDEN)
    assert brief.text.startswith("You are in the middle of a room.") and "task" not in brief.text
    assert {*full.admissible_actions} - {*brief.admissible_actions} == {*HIDDEN} - {"help"}
    assert environment.step("inventory").observation.text.startswith("You are "), "hidden, but played"


def test_unsolvable_games_are_counted_and_corrupt_ones_named(made, tmp_path):
    """Ids are those of their contents: the games are elsewhere."""
    games, manifest = shutil.copytree(made["train"][0], tmp_path / "games"), made["train"][1]
    assert Manifest.scan(games).rows() == manifest.rows()
    bad, corrupt = sorted(games.glob("*/*/game.tw-pddl"))[:2]
    bad.write_text(json.dumps(json.loads(bad.read_text()) | {"solvable": False}))
    found = Manifest.scan(games)
    assert found.skipped == {"unsolvable": 1} and len(found) == NUMBER - 1
    whole = json.loads(corrupt.read_text())
    for content in ("{", "[]", json.dumps({"grammar": ""})):
        corrupt.write_text(content)
        with pytest.raises(CorruptGameError, match=corrupt.parent.name):
            Manifest.scan(games)
    # Valid JSON that the engine cannot load; and a file that changes after the scan.
    corrupt.write_text(json.dumps(whole | {"pddl_problem": "(define (problem generated) (:domain alfred"}))
    found = Manifest.scan(games)
    task_id = next(task_id for task_id, (_, path) in found.games.items() if path == str(corrupt))
    for content in (corrupt.read_text(), json.dumps(whole)):
        corrupt.write_text(content)
        with pytest.raises(CorruptGameError, match=corrupt.parent.name):
            AlfworldEnvironment(found).reset(task_id=task_id)


def test_it_is_played_again(manifest):
    row = manifest.rows()[0]
    walkthrough = read_game(manifest.path(row["task_id"]))["walkthrough"]
    check_played_again(partial(AlfworldEnvironment, manifest), row, ["dance", *walkthrough])


# -- the official games, here a small release of generated ones -------------------------------------------------------


@pytest.mark.parametrize("fault", ["a missing game", "another known game", "a change after the record"])
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
    train = Manifest.scan(tmp_path / RELEASE / "train")
    is_known = fault == "another known game"
    game = Path(train.path(next(game for game in train.games if (game in known["train"]) == is_known)))
    if fault == "a missing game":
        game.unlink()
    else:
        game.write_text(game.read_text().replace('"pddl_problem": "', '"pddl_problem": "\\n'))
    with refused("directory"):
        official_games("train", tmp_path, release)
