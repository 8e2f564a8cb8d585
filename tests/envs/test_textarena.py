"""TextArena's single-player games are played through the adapter."""

import random
from functools import partial

import pytest

pytest.importorskip("textarena", reason="textarena is not installed: pip install -e '.[textarena]'")

from refusals import refused
from returning import check_played_again

from g2po_trl import TextArenaEnvironment

MOVES = ["[up]", "[down]", "[left]", "[right]"]
HANOI = ["A C", "A B", "[C B]", "[A C]", "[B A]", "[B C]", "A C"]


def opened(env_id, options=None, seed=1, **more):
    game = TextArenaEnvironment(env_id, options, **more)
    return game, game.reset(seed=seed)


def test_the_rules_are_the_task_and_the_board_is_the_state():
    game, first = opened("TowerOfHanoi-v0")
    assert first.task.startswith("You are playing Tower of Hanoi") and first.text.startswith("Current Board")
    results = [game.step(move) for move in HANOI]
    assert "You moved disk 1 from A to C." in results[0].observation.text
    assert "You moved" not in results[0].observation.state_key and first.task not in results[0].observation.text
    assert game.reset(seed=1) == first
    back = [game.step(move) for move in ("A B", "B A")][1]
    assert back.observation.state_key == first.state_key, "another way to the same board"
    last = results[-1]
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    assert not any(result.terminated or result.reward for result in results[:-1])
    assert "Congratulations" in last.observation.text


def test_illegal_moves_end_a_game_that_has_forgiven_one():
    game, _ = opened("TowerOfHanoi-v0-train")
    _, forgiven, ended = (game.step(move) for move in ("A B", "A Z", "look"))
    assert "invalid move" in forgiven.observation.text and not forgiven.terminated
    assert ended.terminated and not ended.info["success"]
    assert ended.info["failure_reason"].startswith("invalid_move: Invalid Move")


@pytest.mark.parametrize("env_id", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_games_that_mix_up_what_they_tell_of_a_move(env_id):
    game, _ = opened(env_id)
    forgiven, ended = (game.step("[no move]") for _ in "ab")
    assert "invalid move" in forgiven.observation.text
    assert ended.terminated and 0 <= ended.reward < 1 and "format" in ended.info["failure_reason"]


def test_a_part_of_the_way_is_paid_and_no_success():
    game, first = opened("FrozenLake-v0", {"num_holes": 1}, seed=2, actions=MOVES)
    assert first.admissible_actions == MOVES
    ended = [game.step(move) for move in ("right", "nowhere", "nowhere")][2]
    assert 0 < ended.reward < 1 and ended.info["success"] is False


def test_games_whose_answers_do_not_tell_the_state_are_told_apart_by_their_history():
    keys = {"observation": [], "history": []}
    for kind, found in keys.items():
        for guesses in ("12", "21", "12"):
            game, _ = opened("GuessTheNumber-v0", seed=5, state_key=kind)
            found.append([game.step(guess).observation.state_key for guess in guesses])
    one, other, again = keys["history"]
    assert one == again and not set(one) & set(other)
    assert keys["observation"] == [[None, None]] * 3, "'higher', whatever was said"


def test_games_in_turn_do_not_disturb_each_other_or_the_generator():
    def play(game, moves):
        return [game.step(move).observation.text for move in moves]

    alone, first, second = (TextArenaEnvironment("2048-v0-3x3") for _ in range(3))
    assert alone.reset(seed=None) == first.reset()
    expected = [alone.reset(seed=1).text, *play(alone, MOVES), *play(alone, MOVES)]
    random.seed(0)
    seen = [first.reset(seed=1).text]
    second.reset(seed=2)
    for _ in range(2):
        seen += play(first, MOVES)
        play(second, MOVES)
    assert seen == expected and random.random() == random.Random(0).random()


def test_what_cannot_be_played_is_refused():
    for env_id in ("TicTacToe-v0", "MarketEntryGame-v0", "Chess-v7"):
        with refused("env_id"):
            opened(env_id)
    with refused("state_key"):
        opened("TowerOfHanoi-v0", state_key="board")


AGAIN = {
    "2048-v0-3x3": MOVES * 3,
    "TowerOfHanoi-v0": HANOI,
    "FrozenLake-v0": ["right", "down", "nowhere", "down", "nowhere"],
    "GuessTheNumber-v0": ["1", "20", "7", "x", "3"],
}


@pytest.mark.slow  # each worker takes 2 s to import the library
@pytest.mark.parametrize(("env_id", "actions"), AGAIN.items())
def test_games_are_played_again(env_id, actions):
    key = "history" if env_id.startswith("Guess") else "observation"
    check_played_again(partial(TextArenaEnvironment, env_id, state_key=key), {"seed": 4}, actions)
