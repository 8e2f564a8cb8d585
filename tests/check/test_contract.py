from itertools import cycle

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


def broken(**methods):
    return type("Broken", (Good,), methods)


def test_good_environments():
    check_environment(Good, {"start": 0})
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
        (broken(reset=lambda self, start: Observation("x", state_key=7)), "Observation.state_key"),
        (broken(reset=lambda self, start: Observation("x", None, "on")), "Observation.admissible_actions"),
        (broken(reset=lambda self, start: "\ud800"), "Observation.text"),
        (broken(reset=lambda self, start: f"{next(COUNTER)}"), "RANDOM_RESET"),
        (broken(step=lambda self, action: "x"), "Broken.step"),
        (broken(step=lambda self, action: StepResult("x", reward=float("inf"))), "reward"),
        (broken(step=lambda self, action: StepResult("x", info={"score": "high"})), "info['score']"),
        (broken(step=lambda self, action: StepResult("x", terminated="no")), "terminated"),
        (broken(step=lambda self, action: 1 / 0), "RAISED_IN_STEP"),
        (broken(step=lambda self, action: StepResult(action[0])), "RAISED_IN_STEP"),  # the empty action
        (broken(reset=lambda self, start: (_ for _ in ()).throw(ConnectionError("start one"))), "REFUSED"),
        (type("NoEnvironment", (), {"reset": lambda self, start: "x"}), "step"),
        (broken(__init__=lambda self, size: None), "CONSTRUCTION"),
    ],
)
def test_broken_environments(environment, field):
    with refused(field):
        check_environment(environment, {"start": 0})


@pytest.mark.parametrize(("ends", "shown"), [(["up", "down"], ["up", "down"]), (["", "\n"], ["", "⏎"])])
def test_long_starts_are_shown_where_they_differ(ends, shown):
    starts = cycle(["rules " * 50 + end for end in ends])
    findings = contract_findings(broken(reset=lambda self, start: next(starts)), {"start": 0}, [], 1)
    (finding,) = (one for one in findings if one.kind is Kind.RANDOM_RESET)
    assert [finding.facts[name].rpartition("rules ")[2] for name in ("first", "then")] == shown
