"""The ALFWorld adapter, its manifest and its prompts."""

import json
import pickle
import shutil
import sys

import pytest

pytest.importorskip("alfworld")

from g2po_envs.alfworld import (
    ALFWORLD_COMPACT_PROMPT,
    ALFWORLD_PROMPT,
    AlfworldEnvironment,
    CorruptGameError,
    Manifest,
    generate_games,
)
from g2po_envs.alfworld.engine import NOTHING_HAPPENS, read_game, task_text


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


# Environment


def test_reset_gives_the_paper_s_first_observation_or_the_room_alone(manifest):
    _, full, _ = play(manifest, "pick_and_place_simple")
    assert full.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert full.text.endswith(f"Your task is to: {full.task}.")
    _, brief, _ = play(manifest, "pick_and_place_simple", intro=False)
    assert brief.text.startswith("You are in the middle of a room.") and "task" not in brief.text
    assert (brief.task, brief.state_key) == (full.task, full.state_key)


def test_hidden_actions_are_not_listed_but_can_be_played(manifest):
    environment, first, _ = play(manifest, "pick_and_place_simple")
    assert "help" not in first.admissible_actions and "look" in first.admissible_actions
    hidden = ("help", "look", "inventory", "examine")
    environment, first, results = play(manifest, "pick_and_place_simple", hidden_actions=hidden)
    for shown in (first, *(result.observation for result in results)):
        assert not {action.split()[0] for action in shown.admissible_actions} & set(hidden)
    assert environment.step("inventory").observation.text.startswith("You are ")
    with pytest.raises(ValueError, match="hidden_actions"):
        AlfworldEnvironment(manifest, hidden_actions="help")


def test_only_winning_pays(manifest):
    _, _, results = play(manifest, "pick_heat_then_place_in_recep", success_reward=3.0)
    assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [3.0]
    assert [result.info["success"] for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].terminated and not results[0].terminated


def test_a_failed_action_keeps_the_state(manifest):
    environment, first, _ = play(manifest, "pick_and_place_simple")
    task_id = next(iter(manifest.games))
    first = environment.reset(task_id=task_id)
    failed = environment.step("eat the fridge").observation
    assert failed.text == NOTHING_HAPPENS
    assert failed.state_key == first.state_key
    assert failed.admissible_actions == first.admissible_actions
    moved = environment.step(first.admissible_actions[0]).observation
    assert moved.state_key != first.state_key
    assert environment.step("").observation.state_key == moved.state_key


def test_the_same_state_by_another_way_has_the_same_key(manifest):
    environment = AlfworldEnvironment(manifest)
    first = environment.reset(task_id=next(iter(manifest.games)))
    here, there = [action for action in first.admissible_actions if action.startswith("go to ")][:2]
    once = environment.step(here).observation
    environment.step(there)
    again = environment.step(here).observation
    assert (again.text, again.state_key) == (once.text, once.state_key)


def test_reset_starts_anew_and_leaves_the_process_as_it_was(manifest):
    arguments, output = sys.argv, sys.stdout
    environment, first, results = play(manifest, "pick_two_obj_and_place")
    _, again, others = play(manifest, "pick_two_obj_and_place")
    assert again == first and [r.observation for r in others] == [r.observation for r in results]
    assert sys.argv is arguments and sys.stdout is output


def test_misuse_is_told(manifest):
    environment = AlfworldEnvironment(manifest)
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step("look")
    with pytest.raises(ValueError, match="no game 'nope' in manifest"):
        environment.reset(task_id="nope")


# Manifest


def test_ids_come_from_the_content_not_the_path(folder, manifest, tmp_path):
    copy = tmp_path / "elsewhere"
    for number, path in enumerate(sorted(folder.glob("*/*"), reverse=True)):
        shutil.copytree(path, copy / str(number))
    moved = Manifest.scan(copy)
    assert moved.rows() == manifest.rows() and moved.hash == manifest.hash
    assert [row["task_id"] for row in moved.rows()] == sorted(moved.games)


def test_workers_get_a_small_pickle(manifest):
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert len(pickle.dumps(manifest)) < 400 * len(manifest)


def test_manifests_are_merged_and_parted(manifest):
    first = Manifest(dict(list(manifest.games.items())[:2]))
    assert first.merged(manifest).games == manifest.games
    assert manifest.without(first).merged(first).games == manifest.games


def test_the_task_type_comes_from_the_folder_without_a_description(folder, manifest, tmp_path):
    shutil.copytree(folder, tmp_path / "games")
    for path in (tmp_path / "games").glob("*/*/traj_data.json"):
        path.unlink()
    assert Manifest.scan(tmp_path / "games").rows() == manifest.rows()
    nameless = tmp_path / "other" / "some.folder"
    nameless.mkdir(parents=True)
    shutil.copy(next(folder.glob("*/*/game.tw-pddl")), nameless)
    with pytest.raises(CorruptGameError, match="some.folder.*task type unknown"):
        Manifest.scan(tmp_path / "other")


def test_folders_without_games(tmp_path):
    with pytest.raises(ValueError, match="no games in .*alfworld-download"):
        Manifest.scan(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        Manifest.scan(tmp_path / "missing")


def test_unsolvable_games_are_counted_and_corrupt_ones_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "games")
    bad, corrupt = sorted((tmp_path / "games").glob("*/*/game.tw-pddl"))[:2]
    bad.write_text(json.dumps(json.loads(bad.read_text()) | {"solvable": False}))
    manifest = Manifest.scan(tmp_path / "games")
    assert manifest.skipped == {"unsolvable": 1} and len(manifest) == 5
    assert "left out 1: unsolvable" in manifest.summary() and manifest.hash in manifest.summary()

    whole = json.loads(corrupt.read_text())
    for content in ("{", "[]", json.dumps({"grammar": ""})):
        corrupt.write_text(content)
        with pytest.raises(CorruptGameError, match=corrupt.parent.name):
            Manifest.scan(tmp_path / "games")

    # Valid JSON that the engine cannot load; and a file that changes after the scan.
    corrupt.write_text(json.dumps(whole | {"pddl_problem": "(define (problem generated) (:domain alfred"}))
    manifest = Manifest.scan(tmp_path / "games")
    task_id = next(task_id for task_id, (_, path) in manifest.games.items() if path == str(corrupt))
    with pytest.raises(CorruptGameError, match=f"{corrupt.parent.name}.*cannot load"):
        AlfworldEnvironment(manifest).reset(task_id=task_id)
    corrupt.write_text(json.dumps(whole))
    with pytest.raises(CorruptGameError, match="changed since the manifest"):
        AlfworldEnvironment(manifest).reset(task_id=task_id)


# Prompts


def test_task_text_is_the_sentence_without_its_full_stop():
    line = '"task": [ {{ "rhs": "Your task is to: {}" \n }} ]'
    assert task_text(line.format("put some cd on safe.")) == "put some cd on safe"
    assert task_text(line.format("Put a cup down. Then leave. ")) == "Put a cup down. Then leave"
    assert task_text("no task here") == ""


@pytest.mark.parametrize("prompt", [ALFWORLD_PROMPT, ALFWORLD_COMPACT_PROMPT])
def test_prompts_show_what_the_agent_must_know(prompt):
    (first,) = prompt.messages("a room. Your task is to: find it.", "find it", ["go to desk 1", "look"])
    assert "a room." in first["content"] and "go to desk 1" in first["content"] and "find it" in first["content"]
    history = [("a room", "go to desk 1"), ("a desk", "take pen 1 from desk 1")]
    (later,) = prompt.messages("You pick up the pen.", "find it", ["look"], history, steps_taken=5)
    for text in (
        "find it",
        "a room",
        "go to desk 1",
        "a desk",
        "take pen 1 from desk 1",
        "You pick up the pen.",
        "look",
    ):
        assert text in later["content"]
    assert prompt.parse_completion("<think>so</think><action>Look</action>", "") == ("look", True)
    assert pickle.loads(pickle.dumps(prompt)) == prompt
