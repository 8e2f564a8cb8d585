"""`python -m pytest`: the environment keeps its contract, and every task can be solved."""

from pathlib import Path

from environment import CoinEnvironment, expert

from g2po_trl import check_environment
from g2po_trl.environments.tasks import read_tasks

TASKS = read_tasks(Path(__file__).with_name("tasks.jsonl"))


def test_contract():
    check_environment(CoinEnvironment, TASKS[0])


def test_the_expert_solves_every_task():
    for task in TASKS:
        environment, rewards, ended = CoinEnvironment(), [], False
        environment.reset(**task)
        while not ended:
            result = environment.step(expert(environment))
            rewards, ended = [*rewards, result.reward], result.terminated
        assert sum(rewards) == 10 and len(rewards) <= 8


def test_what_is_not_possible_changes_nothing():
    environment = CoinEnvironment()
    before = environment.reset(start="hall", coin="attic")
    after = environment.step("put the coin on the table")
    assert after.observation == before and after.reward == 0 and not after.terminated
