"""Environments of the verifiers library, small, and made here: a maze with words, a tool, judges and failures."""

import random

import verifiers as vf
from datasets import Dataset

DOORS = {"hall": ["cellar", "attic"], "cellar": ["hall"], "attic": ["hall", "garden"], "garden": ["attic"]}


class Maze(vf.MultiTurnEnv):
    """Find the room that the row names. What happens by chance is drawn from `random`, as games do."""

    async def setup_state(self, state):
        state["room"], state["weather"] = "hall", random.choice(["sun", "rain", "fog", "snow"])
        return state

    async def env_response(self, messages, state, **kwargs):
        room = messages[-1].content.strip().removeprefix("go ")
        initials = {door[0]: door for door in DOORS[state["room"]]}
        state["room"] = initials.get(room[:1], state["room"])
        answer = vf.UserMessage(content=f"You are in the {state['room']}. There is {state['weather']}.")
        if state["room"] == state["answer"]:
            state["final_env_response"] = [answer]
        return [answer]


def arrived(state, answer):
    return float(state["room"] == answer)


def talkative(completion):
    return 0.01 * len(completion)


def broken(state):
    raise KeyError("no such thing")


def by_group(states) -> list[float]:
    return [0.0 for _ in states]


TASKS = [{"question": f"Go to the {room}.", "answer": room} for room in ("garden", "cellar")]


def maze(rubric=None, **options):
    rubric = rubric or vf.Rubric(funcs=[arrived, talkative], weights=[1.0, 0.0])
    options = {"max_turns": 6, "system_prompt": "Walk by saying: go ROOM.", **options}
    return Maze(dataset=Dataset.from_list(TASKS), rubric=rubric, **options)


def endless():
    return maze(max_turns=-1)


def judged():
    rubric = vf.JudgeRubric(judge_client=object())
    return maze(rubric=vf.RubricGroup([vf.Rubric(funcs=[arrived]), rubric]))


def scored_in_groups():
    return maze(rubric=vf.Rubric(funcs=[by_group]))


def badly_scored():
    return maze(rubric=vf.Rubric(funcs=[broken]))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def correct(completion, answer):
    return float(str(completion[-1]["content"]).strip() == answer)


def adder():
    dataset = Dataset.from_list([{"question": "What are 17 and 25 together?", "answer": "42"}])
    return vf.ToolEnv(dataset=dataset, tools=[add], rubric=vf.Rubric(funcs=[correct]), max_turns=4)
