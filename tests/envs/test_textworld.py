"""TextWorld games by seed: won by their walkthroughs, with keys of their states."""

import pytest

pytest.importorskip("textworld")

from g2po_envs.textworld import TextWorldEnvironment, expert, game_rows
from g2po_envs.textworld.environment import NOT_POSSIBLE
from g2po_envs.textworld.panels import load_panel


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    environment = TextWorldEnvironment(cache_dir=str(tmp_path_factory.mktemp("cache")))
    yield environment
    environment.close()


def test_the_walkthrough_wins(environment):
    seen, results = environment.reset("coin-3", seed=1), []
    assert seen.task and "\n" not in seen.text
    while not results or not results[-1].terminated:
        action = expert(environment)
        assert action in seen.admissible_actions
        results.append(environment.step(action))
        seen = results[-1].observation
    assert [result.reward for result in results] == [0.0, 0.0, 10.0]


def test_a_state_is_where_one_is_and_what_one_has(environment):
    start = environment.reset("coin-3", seed=1)
    assert not {"look", "inventory"} & set(start.admissible_actions)
    wrong = environment.step("dance\0").observation
    assert wrong.text == NOT_POSSIBLE and wrong.state_key == start.state_key and "-=" in start.state_key
    there, back = (environment.step(f"go {way}").observation for way in ("south", "north"))
    assert there.state_key != start.state_key == back.state_key and ">" not in there.text


def test_held_out_games_have_other_seeds():
    panel = load_panel("coin-3", number=3, skip=2)
    assert [row["seed"] for row in panel.rows] == [1_000_002, 1_000_003, 1_000_004]
    assert max(row["seed"] for row in game_rows("coin-3", 5)) < 1_000_000
