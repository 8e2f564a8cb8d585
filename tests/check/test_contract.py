"""Environments that keep their contract, and each way to break it."""

from pathlib import Path

import pytest
from letter_environment import LetterEnvironment
from refusals import refused

from g2po_trl import Observation, StepResult, TextEnvironment, check_environment
from g2po_trl.check.contract import contract_findings
from g2po_trl.check.findings import Kind


class Good(TextEnvironment):
    def reset(self, start, hint="none"):
        self.at = start
        return Observation(f"at {start}", admissible_actions=["on"])

    def step(self, action):
        self.at += action == "on"
        return StepResult(Observation(f"at {self.at}"), terminated=self.at == 3)


class Picky(Good):
    """Takes actions apart as if they were its own, as language models write it."""

    def reset(self, start):
        return Observation("at a fork", admissible_actions=["go left 1", "go right 1"])

    def step(self, action):
        return StepResult(f"{int(action.split(' ')[-1])} step to the side")


def broken(**methods):
    return type("Broken", (Good,), methods)


def test_good_environments():
    check_environment(Good, {"start": 0, "hint": "x"}, actions=["on", "on"])
    check_environment(LetterEnvironment, {"seed": 1})
    greedy = broken(reset=lambda self, boxes: Good.reset(self, boxes.pop()))
    check_environment(greedy, {"boxes": [1, 0]})  # each episode of a run gets the task anew


COUNTER = iter(range(100))


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        (broken(reset=lambda self, start: None), "Broken.reset"),
        (broken(reset=lambda self, start: Observation(7)), "Observation.text"),
        (broken(reset=lambda self, start: Observation("x", None, "on")), "Observation.admissible_actions"),
        (broken(reset=lambda self, start: "\ud800"), "Observation.text"),
        (broken(reset=lambda self, start: f"{next(COUNTER)}"), "RANDOM_RESET"),
        (broken(step=lambda self, action: "x"), "Broken.step"),
        (broken(step=lambda self, action: StepResult("x", reward=float("inf"))), "reward"),
        (broken(step=lambda self, action: StepResult("x", info={"score": "high"})), "info['score']"),
        (broken(step=lambda self, action: StepResult("x", terminated="no")), "terminated"),
        (broken(step=lambda self, action: StepResult(action[0])), "RAISED_IN_STEP"),  # the empty action
        (broken(reset=lambda self, start: (_ for _ in ()).throw(ConnectionError("start one"))), "REFUSED"),
        (type("NoEnvironment", (), {"reset": lambda self, start: "x"}), "step"),
        (broken(__init__=lambda self, size: None), "CONSTRUCTION"),
    ],
)
def test_broken_environments(environment, field):
    with refused(field):
        check_environment(environment, {"start": 0})


def test_actions_that_are_nearly_admissible():
    """And the line of the user's code is named, not the line of what plays it."""
    source = Path(__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(source) if "int(action.split" in text)
    found = {finding.kind: finding.facts for finding in contract_findings(Picky, {"start": 0}, None, 4)}
    assert found[Kind.RAISED_IN_STEP]["error"].startswith("ValueError: invalid literal for int()")
    assert found[Kind.RAISED_IN_STEP]["where"].endswith(f"{Path(__file__).name}, line {line}")
