"""The ALFWorld adapter, its manifest and its prompts."""

import json
import shutil
import sys
from functools import partial

import pytest

pytest.importorskip("alfworld")

from refusals import refused
from returning import check_played_again

from g2po_envs.alfworld import AlfworldEnvironment, CorruptGameError, Manifest, generate_games
from g2po_envs.alfworld.engine import read_game

HIDDEN = ("help", "look", "inventory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alfworld") / "games"
    generate_games(folder, "train", 6, seed=0, size="tiny", num_workers=1, progress=False)
    return folder


@pytest.fixture(scope="module")
def manifest(folder):
    return Manifest.scan(folder)


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


def test_ids_come_from_the_content_not_the_path(folder, manifest, tmp_path):
    for number, path in enumerate(sorted(folder.glob("*/*"), reverse=True)):
        shutil.copytree(path, tmp_path / "elsewhere" / str(number))
    moved = Manifest.scan(tmp_path / "elsewhere")
    assert moved.rows() == manifest.rows() and moved.hash == manifest.hash
    assert [row["task_id"] for row in moved.rows()] == sorted(moved.games)


def test_unsolvable_games_are_counted_and_corrupt_ones_named(folder, tmp_path):
    games = shutil.copytree(folder, tmp_path / "games")
    bad, corrupt = sorted(games.glob("*/*/game.tw-pddl"))[:2]
    bad.write_text(json.dumps(json.loads(bad.read_text()) | {"solvable": False}))
    manifest = Manifest.scan(games)
    assert manifest.skipped == {"unsolvable": 1} and len(manifest) == 5

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


def test_what_is_refused(manifest, tmp_path):
    for field, call in (
        ("directory", partial(Manifest.scan, tmp_path)),
        ("directory", partial(Manifest.scan, tmp_path / "missing")),
        ("hidden_actions", partial(AlfworldEnvironment, manifest, hidden_actions="help")),
        ("key", partial(AlfworldEnvironment, manifest, key="text")),
        ("task_id", partial(AlfworldEnvironment(manifest).reset, task_id="nope")),
    ):
        with refused(field):
            call()


def test_it_is_played_again(manifest):
    row = manifest.rows()[0]
    walkthrough = read_game(manifest.path(row["task_id"]))["walkthrough"]
    check_played_again(partial(AlfworldEnvironment, manifest), row, ["dance", *walkthrough])
