"""One diagnosis for check, the end of training, reports and the viewer: the environment before the model."""

import pytest

from g2po_trl import Step, Trajectory
from g2po_trl.credit.graph import record
from g2po_trl.runs.diagnosis import Evidence, Fault


def group(*paths, reward=0.0, outcome="failure", reason=None):
    return [
        record(Trajectory("t", [Step(state, "go") for state in path], reward, outcome, failure_reason=reason))
        for path in paths
    ]


GOOD = group("ab", "ac", reward=10.0, outcome="success")


@pytest.mark.parametrize(
    ("groups", "faults"),
    [
        ([GOOD], []),
        ([group("ab", "ac"), GOOD], []),
        ([group("ab", "ac", outcome="truncated")], []),
        ([group("ab", "ac")], [Fault.NO_REWARD]),
        ([group("ab", "bc", reward=1.0)], [Fault.DIFFERENT_STARTS]),
        ([group("aa", "aaa", reward=1.0)], [Fault.SINGLE_STATE]),
        ([group("a", "a", reward=1.0)], []),
        ([group("ab", "ab", reason="context overflow: 9 tokens")], [Fault.CONTEXT_OVERFLOW]),
        ([group("ab", "bc"), group("aa", "bb", outcome="error")], [Fault.DIFFERENT_STARTS, Fault.NO_REWARD]),
        ([], []),
    ],
)
def test_faults_of_the_environment_come_in_their_order(groups, faults):
    evidence = Evidence()
    for episodes in groups:
        evidence.add_group(episodes)
    assert evidence.faults() == faults
    assert all(evidence.describe(fault)[1] for fault in faults)
