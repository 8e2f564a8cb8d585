"""Gymnasium environments are played through the adapter."""

from functools import partial

import pytest

pytest.importorskip("gymnasium", reason='gymnasium is not installed: pip install -e ".[gymnasium]"')

from refusals import refused
from returning import check_played_again

from g2po_trl import GymnasiumEnvironment

LETTERS, DICE = (f"games_of_gymnasium:{name}-v0" for name in ("Letters", "Dice"))
LAKE = {
    "env_id": "FrozenLake-v1",
    "make_options": {"render_mode": "ansi", "is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
    "task": "Reach the goal G, and do not fall into a hole H.",
}


def test_texts_pass_through_and_success_is_told():
    game = GymnasiumEnvironment(LETTERS, {"word": "attic"}, actions_in_info="can", task="Say letters.")
    first = game.reset(seed=3)
    assert first == game.reset(seed=3) and first != game.reset(seed=4)
    assert first.text.startswith("attic ") and first.admissible_actions == ["a", "z"] and first.task == "Say letters."
    assert game.reset(seed=None) == game.reset(), "a row without a seed is one task"
    last = [game.step(letter) for letter in "ab"][1]
    assert (last.observation.text, last.reward, last.terminated, last.truncated) == ("kitchen", 10.0, True, False)
    assert last.info == {"success": True, "turns": 1}, "what is no plain value, and a score that is none, are left out"


def test_an_impossible_action_is_answered_and_not_played():
    game = GymnasiumEnvironment(LETTERS)
    first = game.reset(seed=3, level=2, task_id="one", task_type="easy", of_another_row=None)
    assert game.env.unwrapped.options == {"level": 2}, "columns of a row are Gymnasium's options"
    answer = game.step("go north")
    assert first.text in answer.observation.text and game.env.unwrapped.said == ""
    assert answer.observation.state_key == first.text and answer.info == {"invalid_action": True}


def test_a_game_that_draws_itself():
    game = GymnasiumEnvironment(**LAKE)
    first = game.reset(seed=0)
    assert (first.state_key, first.admissible_actions) == ("0", LAKE["action_names"])
    assert first.text.startswith("\n<S>FFF")
    assert "left, down, right, up" in game.step("fly").observation.text
    results = [game.step(action) for action in ("down", "down", "right", "right", "down", "right")]
    assert [result.observation.state_key for result in results] == ["4", "8", "9", "10", "14", "15"]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0] and results[-1].terminated
    game.close()


def test_masked_actions_are_not_listed():
    taxi = GymnasiumEnvironment("Taxi-v4", {"render_mode": "ansi"})
    assert 0 < len(taxi.reset(seed=3).admissible_actions) < 6


def test_what_cannot_be_played_is_refused():
    for field, options in (
        ("env_id", {"env_id": "Letters-v7"}),
        ("observation_space", {"env_id": "FrozenLake-v1"}),
        ("action_names", {**LAKE, "action_names": ["left"]}),
    ):
        with refused(field):
            GymnasiumEnvironment(**options)


SLIPPERY = {**LAKE, "make_options": {"render_mode": "ansi", "is_slippery": True}}


@pytest.mark.parametrize(
    ("options", "actions", "outcome"),
    [
        ({"env_id": DICE}, ["a", "b", "go north", "c", "a"], "truncated"),  # by Gymnasium's own time limit
        (SLIPPERY, ["right", "down", "fly", *6 * ["up"]], "failure"),
    ],
)
def test_chance_is_played_again(options, actions, outcome):
    """Chance of the game's own generator, and of Python's, which its neighbours in the worker use as well."""
    assert check_played_again(partial(GymnasiumEnvironment, **options), {"seed": 5}, actions).outcome == outcome
