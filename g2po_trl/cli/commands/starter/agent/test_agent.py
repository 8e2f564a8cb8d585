"""`python -m pytest`: the agent plays what a script answers in the model's place."""

from pathlib import Path

import pytest
from agent import expert, walk

from g2po_trl import AgentEnvironment
from g2po_trl.environments.tasks import read_tasks
from g2po_trl.prompts.conversation import ChatResponse


def play(task, answers):
    """Return all requests of an episode, and its last step's result."""
    environment = AgentEnvironment(walk, max_turns=8)
    try:
        requests = [environment.reset(**task)]
        for answer in answers:
            result = environment.step(answer.to_action())
            requests.append(result.observation)
    finally:
        environment.close()
    return requests[:-1], result


def go(door):
    return ChatResponse("", ({"type": "function", "function": {"name": "go", "arguments": {"door": door}}},))


def test_the_goal_is_rewarded():
    requests, end = play({"start": "hall", "goal": "library"}, [go("east"), go("east")])
    assert [one.text for one in requests][1] == "tool: You are in the study. Doors: north, west, east."
    assert end.terminated and end.reward == 1


def test_the_expert_solves_every_task():
    for task in read_tasks(Path(__file__).with_name("tasks.jsonl")):
        environment, result = AgentEnvironment(walk, max_turns=8), None
        seen = environment.reset(**task)
        while result is None or not result.terminated:
            result = environment.step(go(**expert(seen.request.messages, None)["arguments"]).to_action())
            seen = result.observation
        assert result.reward == 1
        environment.close()


@pytest.mark.parametrize("answer", [ChatResponse("I give up."), go("up")])
def test_anything_else_is_not(answer):
    answers = [answer] * (8 if answer.tool_calls else 1)
    _, end = play({"start": "hall", "goal": "library"}, answers)
    assert end.terminated and end.reward == 0


def test_equal_rooms_are_one_state():
    requests, _ = play({"start": "hall", "goal": "library"}, [go("east"), go("west"), go("east"), go("east")])
    assert requests[1].state_key == requests[3].state_key != requests[2].state_key


def test_tasks_have_two_rooms():
    tasks = read_tasks(Path(__file__).with_name("tasks.jsonl"))
    assert len(tasks) == 20 and all(task["start"] != task["goal"] for task in tasks)
