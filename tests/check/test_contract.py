from functools import partial

import pytest
from letter_environment import LetterEnvironment

from g2po_trl import Observation, StepResult, TextEnvironment, check_environment
from g2po_trl.environments.tasks import check_task_columns
from g2po_trl.environments.validation import EnvironmentContractError


class Good(TextEnvironment):
    def __init__(self, size=3):
        self.size = size

    def reset(self, start, hint="none"):
        self.at = start
        return Observation(f"at {start}", admissible_actions=["on"])

    def step(self, action):
        self.at += action == "on"
        return StepResult(Observation(f"at {self.at}"), terminated=self.at == self.size)


def test_good_environments():
    check_environment(Good, {"start": 0})
    check_environment(partial(Good, size=2), {"start": 0, "hint": "x"}, actions=["on", "on"])
    check_environment(LetterEnvironment, {"seed": 1})


def test_reset_may_change_what_it_is_given():
    """Each episode of a run gets the task anew."""

    class Greedy(Good):
        def reset(self, boxes):
            self.box = boxes.pop()
            return super().reset(self.box)

    check_environment(Greedy, {"boxes": [1, 0]})


def broken(**methods):
    return type("Broken", (Good,), methods)


COUNTER = iter(range(100))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (broken(reset=lambda self, start: None), "reset returned None"),
        (broken(reset=lambda self, start: 5), "reset returned 5"),
        (broken(reset=lambda self, start: Observation(7)), "Observation.text is 7"),
        (broken(reset=lambda self, start: Observation("x", state_key=7)), "Observation.state_key is 7"),
        (broken(reset=lambda self, start: Observation("x", admissible_actions="on")), "admissible_actions is 'on'"),
        (broken(reset=lambda self, start: f"{next(COUNTER)}"), "not deterministic"),
        (broken(step=lambda self, action: "x"), "step returned 'x'"),
        (broken(step=lambda self, action: StepResult("x", reward=float("inf"))), "reward is inf"),
        (broken(step=lambda self, action: StepResult("x", reward="10")), "reward is '10'"),
        (broken(step=lambda self, action: StepResult("x", info={"score": "high"})), r"info\['score'\] is 'high'"),
        (
            broken(step=lambda self, action: StepResult("x", info={"score_best": None})),
            r"info\['score_best'\] is None",
        ),
        (broken(step=lambda self, action: 1 / 0), "raised ZeroDivisionError"),
        (broken(step=lambda self, action: StepResult(action[0])), "raised IndexError"),  # the empty action
        (broken(step=lambda self, action: StepResult("x", terminated="no")), "terminated is 'no'"),
        (broken(reset=lambda self, start: "\ud800"), "Observation.text is"),
        (type("NoEnvironment", (), {"reset": lambda self, start: "x"}), "no method step"),
    ],
)
def test_broken_environments_are_told_why(environment, message):
    with pytest.raises(EnvironmentContractError, match=message):
        check_environment(environment, {"start": 0})


def test_a_server_that_is_gone_is_no_fault_of_the_tasks():
    def reset(self, start):
        raise ConnectionError("no server can be reached: start one")

    with pytest.raises(EnvironmentContractError, match="Broken: ConnectionError: no server .*start one") as told:
        check_environment(broken(reset=reset), {"start": 0})
    assert "Remove tasks" not in str(told.value)


def test_an_environment_that_cannot_be_made():
    with pytest.raises(EnvironmentContractError, match="functools.partial"):
        check_environment(type("Needy", (Good,), {"__init__": lambda self, size: None}), {"start": 0})


def test_columns():
    check_task_columns(Good, ["start"])
    check_task_columns(partial(Good, size=2), ["hint", "start"])
    check_task_columns(lambda: Good(), ["anything"])
    with pytest.raises(ValueError, match="Good.reset .*start"):
        check_task_columns(Good, ["hint"])
    with pytest.raises(ValueError, match="Good.reset .*start"):
        check_task_columns(Good, [])
    with pytest.raises(ValueError, match="Good.reset .*colour"):
        check_task_columns(Good, ["start", "colour"])
