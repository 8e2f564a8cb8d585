"""Environments of the verifiers library are played, checked and trained on through the adapter."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-verifiers")

from letter_environment import LETTER_PROMPT
from returning import check_returned_everywhere

from g2po_trl import EnvironmentPool, VerifiersEnvironment
from g2po_trl.check import examine
from g2po_trl.runs.run_description import load_object

pytestmark = pytest.mark.verifiers
MAZE = "games_of_verifiers:maze"


@pytest.fixture
def make():
    made = []

    def one(*args, **kwargs):
        made.append(VerifiersEnvironment(*args, **kwargs))
        return made[-1]

    yield one
    for environment in made:
        environment.close()


def test_what_is_new_is_shown_and_the_rubric_pays_at_the_end(make):
    game = make(MAZE)
    first = game.reset(example_id=0)
    assert first.task == "Walk by saying: go ROOM.\n\nGo to the garden." and first.text == "The task begins."
    there, nowhere, arrived = (game.step(action) for action in ("go attic", "fly", "go garden"))
    assert there.observation.text.startswith("You are in the attic.") and there.observation == nowhere.observation
    assert not (there.terminated or there.reward or nowhere.terminated)
    assert (arrived.reward, arrived.terminated, arrived.info["success"]) == (1.0, True, True)
    assert arrived.observation.startswith("You are in the garden."), "the last words of the environment"
    assert arrived.info["score_arrived"] == 1.0 and arrived.info["score_talkative"] == 0.06
    assert arrived.info["stop_condition"] == "has_final_env_response"
    with pytest.raises(RuntimeError, match="call reset"):
        game.step("go attic")


def test_out_of_turns_is_scored_too(make):
    game = make(MAZE, max_turns=2, success_reward=0.0)
    game.reset(example_id=1)
    game.step("go attic")
    last = game.step("go hall")
    assert (last.reward, last.terminated, last.info["stop_condition"]) == (0.0, True, "max_turns_reached")
    assert last.info["success"] is True, "0 or more is a success here"


def test_a_task_starts_and_goes_on_by_its_seed_alone(make):
    games = [make(MAZE) for _ in range(2)]

    def weather(game, seed):
        game.reset(example_id=1, seed=seed)
        return game.step("go attic").observation.text

    seen = [weather(games[0], seed) for seed in range(6)]
    assert len(set(seen)) > 1
    assert [weather(games[1], seed) for seed in reversed(range(6))] == seen[::-1], "episodes are left in the middle"


def test_state_keys_by_history(make):
    game = make(MAZE, state_key="history")
    keys = []
    for path in (("go attic", "fly"), ("fly", "go attic"), ("go attic", "fly")):
        keys.append([game.reset(example_id=0).state_key, *(game.step(a).observation.state_key for a in path)])
    assert keys[0] == keys[2] and keys[0][0] == keys[1][0] and not set(keys[0][1:]) & set(keys[1][1:])


def test_tools_are_told_and_called(make):
    game = make("games_of_verifiers:adder")
    first = game.reset(example_id=0)
    assert '"name": "add"' in first.task and first.task.endswith("What are 17 and 25 together?")
    call = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": %s}}</tool_call>'
    assert game.step(call % 25).observation.text == "42"
    assert "none" in game.step('<tool_call>{"name": "none"}</tool_call>').observation.text
    last = game.step("42")
    assert (last.reward, last.info["score_add_calls"]) == (1.0, 1.0)
    game.reset(example_id=0)
    assert game.step("<tool_call>{").terminated, "a call that cannot be read is none, and a reply without one ends it"


@pytest.mark.parametrize(
    "name, message",
    [
        ("endless", "max_turns is None, and games_of_verifiers:endless sets no limit: pass the trainer's"),
        ("judged", "asks a language model as a judge"),
        ("scored_in_groups", "scores groups of rollouts together"),
        ("add", "no MultiTurnEnv"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_remedy(name, message):
    with pytest.raises(ValueError, match=message):
        VerifiersEnvironment(f"games_of_verifiers:{name}", env_args={"a": 1, "b": 2} if name == "add" else None)


def test_rows_that_are_not_there(make):
    game = make(MAZE)
    with pytest.raises(ValueError, match="example_id is 2: .* has rows 0 to 1"):
        game.reset(example_id=2)
    with pytest.raises(ValueError, match="split is 'test': choose one of train, eval"):
        game.reset(example_id=0, split="test")


def test_a_rubric_that_fails_is_an_error_and_no_reward_of_zero(make):
    game = make("games_of_verifiers:badly_scored")
    for _ in range(2):  # and the environment can be used again
        game.reset(example_id=0)
        game.step("go attic")
        with pytest.raises(RuntimeError, match="rubric of games_of_verifiers:badly_scored failed: .*no such thing"):
            game.step("go garden")


def test_signal_handlers_stay_as_they_were(make):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make(MAZE)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_checked_trained_on_and_described(make_trainer):
    maze = partial(VerifiersEnvironment, MAZE, max_turns=6)
    rows = [{"example_id": number} for number in range(2)]
    findings = examine(maze, rows, episodes=2, turns=6)
    assert not [finding for finding in findings if finding.level == "error"]
    with EnvironmentPool(maze, num_workers=1) as pool:
        assert "garden" in pool.reset(rows)[0].task
    from datasets import Dataset

    trainer = make_trainer(environment=maze, dataset=Dataset.from_list(rows), max_steps=1)
    assert trainer.prompt_template is LETTER_PROMPT, "one that is passed wins"
    trainer.train()
    folder = Path(trainer.args.output_dir)
    played = [json.loads(line) for line in (folder / "trajectories" / "train-000001.jsonl").read_text().splitlines()]
    assert len(played) == 8 and {one["outcome"] for one in played} <= {"success", "failure"}
    described = json.loads((folder / "run.json").read_text())["environment"]
    environment = load_object(described)()
    assert environment.reset(example_id=1).task.endswith("Go to the cellar.")
    environment.close()


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("maze", ["go attic", "fly", "go hall", "go attic", "go garden"]),
        (
            "adder",
            [
                "".join(
                    f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}</tool_call>' for a in (1, 2)
                ),
                '<tool_call>{"name": "none"}</tool_call>',
                "42",
            ],
        ),
    ],
)
def test_branches_return_to_states(name, actions):
    factory = partial(VerifiersEnvironment, f"games_of_verifiers:{name}", state_key="history")
    check_returned_everywhere(factory, {"example_id": 0, "seed": 2}, actions)
