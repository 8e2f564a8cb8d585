"""`python -m pytest`: the environment keeps its contract, and every task can be solved."""

from pathlib import Path

from environment import DOORS, CoinEnvironment

from g2po_trl import check_environment
from g2po_trl.environments.tasks import read_tasks

TASKS = read_tasks(Path(__file__).with_name("tasks.jsonl"))


def path(start, end):
    """Return the rooms of the shortest path."""
    paths = [[start]]
    while paths[0][-1] != end:
        paths = paths[1:] + [[*paths[0], room] for room in DOORS[paths[0][-1]]]
    return paths[0][1:]


def test_contract():
    check_environment(CoinEnvironment, TASKS[0])


def test_every_task_can_be_solved():
    for task in TASKS:
        environment = CoinEnvironment()
        environment.reset(**task)
        actions = [f"go to {room}" for room in path(task["start"], task["coin"])] + ["take the coin"]
        actions += [f"go to {room}" for room in path(task["coin"], "hall")] + ["put the coin on the table"]
        results = [environment.step(action) for action in actions]
        assert [result.terminated for result in results] == [False] * (len(actions) - 1) + [True]
        assert sum(result.reward for result in results) == 10


def test_what_is_not_possible_changes_nothing():
    environment = CoinEnvironment()
    before = environment.reset(start="hall", coin="attic")
    after = environment.step("put the coin on the table")
    assert after.observation == before and after.reward == 0 and not after.terminated
