"""TextWorld games by seed: made once, won by their walkthroughs, the same for every worker."""

import pytest

pytest.importorskip("textworld")

from refusals import refused

from g2po_envs.textworld import TEXTWORLD_PROMPT, TextWorldEnvironment, expert, game_rows, make_game
from g2po_envs.textworld.environment import NOT_POSSIBLE
from g2po_envs.textworld.panels import load_panel


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(("kind", "most"), [("coin-3", 3), ("simple", 20)])
def test_the_walkthrough_wins(cache, kind, most):
    environment = TextWorldEnvironment(cache_dir=cache)
    seen = environment.reset(kind, seed=1)
    assert seen.task and "\n" not in seen.text
    for _ in range(most):
        action = expert(environment)
        assert action in seen.admissible_actions
        result = environment.step(action)
        seen = result.observation
        if result.terminated:
            break
    assert result.terminated and result.reward == 10.0
    environment.close()


def test_a_state_is_where_one_is_and_what_one_has(cache):
    environment = TextWorldEnvironment(cache_dir=cache)
    start = environment.reset("coin-3", seed=1)
    assert not {"look", "inventory"} & set(start.admissible_actions)
    wrong = environment.step("dance\0").observation
    assert wrong.text == NOT_POSSIBLE and wrong.state_key == start.state_key and "-=" in start.state_key
    there, back = (environment.step(f"go {way}").observation for way in ("south", "north"))
    assert there.state_key != start.state_key == back.state_key and ">" not in there.text
    text = TEXTWORLD_PROMPT.messages(back.text, back.task, back.admissible_actions, [(start.text, "go south")], 1)
    assert "go south" in text[0]["content"] and back.task in text[0]["content"]


def test_held_out_games_have_other_seeds(cache):
    panel = load_panel("coin-3", number=3, skip=2)
    assert [row["seed"] for row in panel.rows] == [1_000_002, 1_000_003, 1_000_004]
    assert not {row["seed"] for row in panel.rows} & {row["seed"] for row in game_rows("coin-3", 5)}
    made = make_game("coin-3", 0, cache)
    before = made.stat().st_mtime_ns
    assert make_game("coin-3", 0, cache).stat().st_mtime_ns == before, "made once"
    with refused("panel"):
        load_panel("chess")
    with refused("kind"):
        make_game("chess", 0)
