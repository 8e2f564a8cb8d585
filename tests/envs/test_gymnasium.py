"""Gymnasium environments are played through the adapter."""

from functools import partial

import pytest

pytest.importorskip("gymnasium", reason='gymnasium is not installed: pip install -e ".[gymnasium]"')

from games_of_gymnasium import TextWalk
from refusals import refused
from returning import check_played_again

from g2po_trl import EnvironmentPool, GymnasiumEnvironment, PoolLimits
from g2po_trl.environments.tasks import check_task_columns

LETTERS, DICE = (f"games_of_gymnasium:{name}-v0" for name in ("Letters", "Dice"))
LAKE = {
    "env_id": "FrozenLake-v1",
    "make_options": {"render_mode": "ansi", "is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
    "task": "Reach the goal G, and do not fall into a hole H.",
}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


def test_texts_pass_through_and_success_is_told():
    game = GymnasiumEnvironment(LETTERS, {"word": "attic"}, actions_in_info="can", task="Say letters.")
    first = game.reset(seed=3)
    assert first == game.reset(seed=3) and first != game.reset(seed=4)
    assert first.text.startswith("attic ") and first.admissible_actions == ["a", "z"] and first.task == "Say letters."
    last = [game.step(letter) for letter in "ab"][1]
    assert (last.observation.text, last.reward, last.terminated, last.truncated) == ("kitchen", 10.0, True, False)
    assert last.info == {"success": True, "turns": 1}, "what is no plain value, and a score that is none, are left out"


def test_columns_of_a_row_are_gymnasiums_options():
    game = GymnasiumEnvironment(LETTERS)
    game.reset(seed=1, level=2, task_id="one", task_type="easy", of_another_row=None)
    assert game.env.unwrapped.options == {"level": 2}
    check_task_columns(partial(GymnasiumEnvironment, LETTERS), ["seed", "level"])


def test_an_impossible_action_is_answered_and_not_played():
    game, anything = (GymnasiumEnvironment(LETTERS, any_text=any_text) for any_text in (False, True))
    first = game.reset(seed=3)
    answer = game.step("go north")
    assert first.text in answer.observation.text and game.env.unwrapped.said == ""
    assert answer.observation.state_key == first.text and answer.info == {"invalid_action": True}
    anything.reset()
    assert anything.step("go north").observation.text == "kitchen"


def test_a_game_that_draws_itself():
    game = GymnasiumEnvironment(**LAKE)
    first = game.reset(seed=0)
    assert first.text.startswith("\n<S>FFF") and first.state_key == "0"
    assert first.admissible_actions == LAKE["action_names"]
    assert "left, down, right, up" in game.step("fly").observation.text
    results = [game.step(action) for action in TO_THE_GOAL]
    assert [result.observation.state_key for result in results] == ["4", "8", "9", "10", "14", "15"]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0] and results[-1].terminated
    game.close()


def test_masked_actions_are_not_listed():
    taxi = GymnasiumEnvironment("Taxi-v4", {"render_mode": "ansi"})
    first = taxi.reset(seed=3)
    assert 0 < len(first.admissible_actions) < 6
    assert taxi.reset(seed=None) == taxi.reset(), "a row without a seed is one task"
    taxi.reset(seed=3)
    assert taxi.step(first.admissible_actions[0]).observation.state_key != first.state_key


def test_spaces_of_another_kind_by_a_class_of_ones_own():
    walk = TextWalk()
    assert walk.reset().text == "You are at 0."
    assert walk.step("2.5").observation.state_key == "2.5"
    assert "could not convert" in walk.step("north").observation.text
    with EnvironmentPool(TextWalk, PoolLimits(1)) as pool:
        assert pool.reset([{}])[0].task == "Walk."


def test_what_cannot_be_played_is_refused():
    for field, options in (
        ("env_id", {"env_id": "Letters-v7"}),
        ("observation_space", {"env_id": "FrozenLake-v1"}),
        ("observation_space", {"env_id": "games_of_gymnasium:Walk-v0"}),
        ("action_names", {**LAKE, "action_names": ["left"]}),
        ("action_names", {"env_id": LETTERS, "action_names": ["left"]}),
    ):
        with refused(field):
            GymnasiumEnvironment(**options)


SLIPPERY = {**LAKE, "make_options": {"render_mode": "ansi", "is_slippery": True}}
WALKS = [
    ({"env_id": DICE}, ["a", "b", "go north", "c", "a"]),
    (SLIPPERY, ["right", "down", "fly", *6 * ["up"]]),
    ({"env_id": "Taxi-v4", "make_options": {"render_mode": "ansi"}}, [*"012345"]),
]


@pytest.mark.parametrize(("options", "actions"), WALKS)
def test_chance_is_played_again(options, actions):
    """Chance of the game's own generator, and of Python's, which its neighbours in the worker use as well."""
    episode = check_played_again(partial(GymnasiumEnvironment, **options), {"seed": 5}, actions)
    assert options["env_id"] != DICE or episode.outcome == "truncated", "Gymnasium's own time limit"
