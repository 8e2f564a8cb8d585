"""`python -m pytest`: the agent plays with scripted answers in place of a model."""

import random
from pathlib import Path

import pytest
from agent import PLACES, expert, tidy

from g2po_trl import AgentEnvironment
from g2po_trl.environments.tasks import read_tasks
from g2po_trl.prompts.conversation import ChatResponse

TASKS = read_tasks(Path(__file__).with_name("tasks.jsonl"))


def play(task, answer, turns=7):
    """Return the keys of an episode's states, and its last step's result; `answer` is a function of the messages."""
    environment, keys, result = AgentEnvironment(tidy, max_turns=turns), [], None
    seen = environment.reset(**task)
    try:
        while result is None or not (result.terminated or result.truncated):
            keys.append(seen.state_key)
            result = environment.step(ChatResponse(answer(seen.request.messages)).to_action())
            seen = result.observation
    finally:
        environment.close()
    return keys, result


def test_the_expert_solves_tasks():
    rng = random.Random(0)
    for task in TASKS[:12]:
        _, end = play(task, lambda messages: expert(messages, None, rng), turns=40)
        assert end.terminated and end.reward == 1


@pytest.mark.parametrize("answer", ["I give up.", "move pen to bed", "move egg to nowhere", ""])
def test_anything_else_is_not(answer):
    keys, end = play({"things": ["pen", "egg"]}, lambda messages: answer)
    assert end.reward == 0 and len(keys) == 7 and len(set(keys[1:])) == 1, "equal messages are one state"


def test_the_last_right_place_is_rewarded():
    answers = iter(["move pen to desk", "move pen to desk", "move egg to fridge"])
    keys, end = play({"things": ["pen", "egg"]}, lambda messages: next(answers))
    assert end.reward == 1 and len(set(keys)) == 3, "with two things, with one, and after a wrong answer"


def test_everything_has_one_place():
    things = [thing for one in PLACES.values() for thing in one]
    assert len(things) == len(set(things)) and {thing for task in TASKS for thing in task["things"]} <= set(things)
