"""`python -m pytest`: the environment keeps its contract, and every task can be solved."""

import random
from pathlib import Path

from environment import PLACES, TidyEnvironment, expert

from g2po_trl import check_environment
from g2po_trl.environments.tasks import read_tasks

TASKS = read_tasks(Path(__file__).with_name("tasks.jsonl"))


def test_contract():
    check_environment(TidyEnvironment, TASKS[0])


def test_the_expert_solves_every_task():
    for task in TASKS:
        environment, rewards, ended = TidyEnvironment(), [], False
        environment.reset(**task)
        rng = random.Random(0)
        while not ended:
            result = environment.step(expert(environment, rng))
            rewards, ended = [*rewards, result.reward], result.terminated
        assert sum(rewards) == 10 and len(rewards) <= 40


def test_everything_has_one_place():
    things = [thing for one in PLACES.values() for thing in one]
    assert len(things) == len(set(things)) and {thing for task in TASKS for thing in task["things"]} <= set(things)


def test_a_wrong_place_changes_nothing():
    environment = TidyEnvironment()
    before = environment.reset(things=["pen", "egg", "cup"])
    after = environment.step("move pen to bed")
    assert after.observation.text == f"Wrong place. {before.text}" and after.observation.state_key == before.state_key
    assert after.reward == 0 and not after.terminated
