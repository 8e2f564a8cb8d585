"""TextArena's single-player games are played, checked and trained on through the adapter."""

import json
import random
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("textarena", reason="textarena is not installed: pip install -e '.[textarena]'")

from refusals import refused
from returning import check_played_again

from g2po_trl import TextArenaEnvironment
from g2po_trl.check.examine import Examination
from g2po_trl.environments.episode_limits import EpisodeLimits

MOVES = ["[up]", "[down]", "[left]", "[right]"]
HANOI = ["A C", "A B", "[C B]", "[A C]", "[B A]", "[B C]", "A C"]


def test_the_rules_are_the_task_and_the_board_is_the_state():
    game = TextArenaEnvironment("TowerOfHanoi-v0")
    first = game.reset(seed=1)
    assert first.task.startswith("You are playing Tower of Hanoi") and first.text.startswith("Current Board")
    results = [game.step(move) for move in HANOI]
    assert "You moved disk 1 from A to C." in results[0].observation.text
    assert "You moved" not in results[0].observation.state_key and first.task not in results[0].observation.text
    assert game.reset(seed=1) == first
    for move in ("A B", "B A"):
        back = game.step(move)
    assert back.observation.state_key == first.state_key, "another way to the same board"
    last = results[-1]
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    assert not any(result.terminated or result.reward for result in results[:-1])
    assert "Congratulations" in last.observation.text
    game.reset()


def test_illegal_moves_end_a_game_that_has_forgiven_one():
    game = TextArenaEnvironment("TowerOfHanoi-v0-train")
    game.reset(seed=1)
    game.step("A B")
    forgiven, ended = game.step("A Z"), game.step("look")
    assert "invalid move" in forgiven.observation.text and not forgiven.terminated
    assert ended.terminated and not ended.info["success"]
    assert ended.info["failure_reason"].startswith("invalid_move: Invalid Move")


@pytest.mark.parametrize("env_id", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_games_that_mix_up_what_they_tell_of_a_move(env_id):
    game = TextArenaEnvironment(env_id)
    game.reset(seed=1)
    assert "invalid move" in game.step("[no move]").observation.text
    ended = game.step("[no move]")
    assert ended.terminated and 0 <= ended.reward < 1 and "format" in ended.info["failure_reason"]


def test_a_part_of_the_way_is_paid_and_no_success():
    game = TextArenaEnvironment("FrozenLake-v0", {"num_holes": 1})
    game.reset(seed=2)
    game.step("right"), game.step("nowhere")
    ended = game.step("nowhere")
    assert 0 < ended.reward < 1 and ended.info["success"] is False


def test_games_whose_answers_do_not_tell_the_state_are_told_apart_by_their_history():
    keys = {}
    for state_key in ("observation", "history"):
        game = TextArenaEnvironment("GuessTheNumber-v0", state_key=state_key)
        for guesses in (("1", "2"), ("2", "1"), ("1", "2")):
            game.reset(seed=5)
            keys.setdefault(state_key, []).append([game.step(guess).observation.state_key for guess in guesses])
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
    expected_outside = random.random()
    random.seed(0)
    seen = [first.reset(seed=1).text]
    second.reset(seed=2)
    for _ in range(2):
        seen += play(first, MOVES)
        play(second, MOVES)
    assert seen == expected and random.random() == expected_outside


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"env_id": "TicTacToe-v0"}, "env_id"),
        ({"env_id": "MarketEntryGame-v0"}, "env_id"),
        ({"env_id": "Chess-v7"}, "env_id"),
        ({"env_id": "TowerOfHanoi-v0", "state_key": "board"}, "state_key"),
    ],
)
def test_what_cannot_be_played_is_refused_by_its_field(options, field):
    with refused(field):
        TextArenaEnvironment(**options).reset(seed=1)


class LetteredLake(TextArenaEnvironment):
    """The tiny model says letters: each is a move."""

    def step(self, action):
        return super().step(MOVES[ord(action) % 4] if len(action) == 1 else action)


@pytest.mark.slow  # each worker takes 2 s to import the library
def test_checked_and_trained_on(make_trainer):
    lake = partial(TextArenaEnvironment, "FrozenLake-v0", actions=MOVES)
    findings = Examination(lake, [{"seed": 1}], episodes=8, episode_limits=EpisodeLimits(20)).at_random()
    assert {finding.level for finding in findings} == {"ok"}
    trainer = make_trainer(environment=partial(LetteredLake, "FrozenLake-v0"), max_steps=1)
    trainer.train()
    file = Path(trainer.args.output_dir) / "trajectories" / "train-000001.jsonl"
    played = [json.loads(line) for line in file.read_text().splitlines()]
    assert {one["outcome"] for one in played} <= {"success", "failure", "truncated"}
    assert any(one["reward"] > 0 for one in played)
    assert max(len(one["steps"]) for one in played) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "actions"),
    [
        ("2048-v0-3x3", MOVES * 3),
        ("TowerOfHanoi-v0", HANOI),
        ("FrozenLake-v0", ["right", "down", "nowhere", "down", "nowhere"]),
        ("GuessTheNumber-v0", ["1", "20", "7", "x", "3"]),
    ],
)
def test_games_are_played_again(env_id, actions):
    key = "history" if env_id.startswith("Guess") else "observation"
    check_played_again(partial(TextArenaEnvironment, env_id, state_key=key), {"seed": 4}, actions)
