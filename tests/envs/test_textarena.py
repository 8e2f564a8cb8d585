"""TextArena's single-player games are played through the adapter."""

import random

import pytest

pytest.importorskip("textarena", reason="textarena is not installed: pip install -e '.[textarena]'")

from refusals import refused

from g2po_trl import TextArenaEnvironment

MOVES = ["[up]", "[down]", "[left]", "[right]"]
HANOI = ["A C", "A B", "[C B]", "[A C]", "[B A]", "[B C]", "A C"]


def opened(env_id, **options):
    game = TextArenaEnvironment(env_id, **options)
    return game, game.reset(seed=1)


def test_the_rules_are_the_task_and_the_board_is_the_state():
    game, first = opened("TowerOfHanoi-v0")
    assert first.task.startswith("You are playing Tower of Hanoi") and first.text.startswith("Current Board")
    *results, last = [game.step(move) for move in HANOI]
    assert "You moved disk 1 from A to C." in results[0].observation.text
    assert "You moved" not in results[0].observation.state_key and first.task not in results[0].observation.text
    assert not any(result.terminated or result.reward for result in results)
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    assert game.reset(seed=1) == first
    back = [game.step(move) for move in ("A B", "B A")][1]
    assert back.observation.state_key == first.state_key, "another way to the same board"


@pytest.mark.parametrize("env_id", ["TowerOfHanoi-v0-train", "Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_illegal_moves_end_a_game_that_has_forgiven_one(env_id):
    """Also in games that mix up what they tell of a move."""
    game, _ = opened(env_id)
    forgiven, ended = (game.step("[no move]") for _ in "ab")
    assert "invalid move" in forgiven.observation.text and not forgiven.terminated
    assert ended.terminated and 0 <= ended.reward < 1 and not ended.info["success"]
    assert ended.info["failure_reason"].startswith("invalid_move: ")


def test_games_whose_answers_do_not_tell_the_state_are_told_apart_by_their_history():
    found = []
    for guesses in ("12", "21", "12"):
        game, _ = opened("GuessTheNumber-v0", state_key="history")
        found.append([game.step(guess).observation.state_key for guess in guesses])
    one, other, again = found
    assert one == again and not set(one) & set(other)


def test_games_in_turn_do_not_disturb_each_other_or_the_generator():
    alone, first, second = (TextArenaEnvironment("2048-v0-3x3") for _ in range(3))
    expected = [alone.reset(seed=1).text, *(alone.step(move).observation.text for move in MOVES)]
    random.seed(0)
    seen = [first.reset(seed=1).text]
    second.reset(seed=2)
    for move in MOVES:
        seen.append(first.step(move).observation.text)
        second.step(move)
    assert seen == expected and random.random() == random.Random(0).random()


def test_what_cannot_be_played_is_refused():
    for env_id in ("TicTacToe-v0", "Chess-v7"):
        with refused("env_id"):
            opened(env_id)
