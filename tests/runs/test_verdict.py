"""What a run says at its end when there was nothing to learn from: said where it is so, and nowhere else."""

from dataclasses import replace

import pytest
from letter_environment import LetterEnvironment

from g2po_trl import Observation, Step, Trajectory
from g2po_trl.runs.verdict import FAULTS, Cause, Tally, verdict


def episode(won=False, states="abc", reward=None, outcome=None, reason=None, **facts):
    outcome = outcome or ("success" if won else "failure")
    steps = [Step(state, "go", **{"admissible_actions": ["go"], **facts}) for state in states]
    return Trajectory("task", steps, 10.0 * won if reward is None else reward, outcome, failure_reason=reason)


def pair(*states, **facts):
    return [episode(states=one, **facts) for one in states]


LOST, WON, MIXED = [episode(), episode()], [episode(True), episode(True)], [episode(True), episode()]
ALONE = [episode(True, "axy"), episode(False, "auv")]
ERRORS = [episode(outcome="error"), episode(outcome="lost")]
MUTE, WRONG = [episode(valid=False)] * 2, [episode(admissible_actions=["stay"])] * 2


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([LOST + [episode(outcome="truncated")] * 6], Cause.NO_REWARD),
        ([[episode(outcome="truncated")] * 2], Cause.NOT_ENDED),
        ([WON, WON], Cause.EQUAL_REWARDS),
        ([WON, LOST], Cause.EQUAL_REWARDS),
        ([ERRORS, ERRORS], Cause.ERRORS),
        ([ERRORS, LOST], Cause.NO_REWARD),
        ([pair("ab", "ac", reason="agent error: KeyError"), pair("ab", "ac", reason="x")], Cause.ENDED_EARLY),
        ([MUTE], Cause.NO_FORMAT),
        ([[episode(completion_ids=[5] * 8, completion_truncated=True)] * 2], Cause.CUT_OFF),
        ([WRONG, MUTE], Cause.NOT_LISTED),
        ([[episode(call="none", admissible_actions=None)] * 2], Cause.NO_CALL),
        ([ALONE, ALONE], Cause.NEVER_COMPARED),
        ([], None),
        ([MIXED], None),
        ([LOST] * 9 + [MIXED], None),
        ([[episode(reward=0.5), episode()]], None),  # nobody won, and one was paid more
        ([ALONE, MIXED], None),
        ([[episode(True, "a"), episode(False, "a")]], None),  # there is no later step
    ],
)
def test_what_is_said(groups, reason):
    found = verdict(Tally.of(groups))
    assert (found and found.cause) is reason


@pytest.mark.parametrize(
    ("groups", "replaced", "estimator", "reason"),
    [
        ([ALONE], [], "g2po without A_EC", Cause.NEVER_COMPARED),
        ([ALONE], [], "g2po without A_NC and A_EC", None),  # A_EP alone is left
        ([ALONE], [], "grpo", None),
        ([ALONE], [], "my_advantages", None),
        ([WON, LOST], [], "ppo", None),
        ([LOST, LOST], [], "ppo", Cause.NO_REWARD),
        ([LOST], WON, "g2po", Cause.EQUAL_REWARDS),  # groups that were replaced are not forgotten
    ],
)
def test_estimators_learn_from_different_things_and_of_replaced_groups(groups, replaced, estimator, reason):
    found = verdict(Tally.of(groups, replaced), estimator)
    assert (found and found.cause) is reason


class Hopeless(LetterEnvironment):
    """Nothing is ever paid. It lists what it knows."""

    def reset(self, seed):
        return replace(super().reset(seed), admissible_actions=["dance"])

    def step(self, action):
        result = super().step(action)
        return replace(result, reward=0.0, observation=Observation(result.observation, admissible_actions=["dance"]))


def test_a_run_says_it_once_also_when_it_was_resumed(make_trainer, tmp_path, capsys):
    """With the numbers of all of it."""
    trainer = make_trainer(Hopeless, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert capsys.readouterr().out.count(Cause.NOT_LISTED.wording[1]) == 1
    trainer = make_trainer(Hopeless, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert capsys.readouterr().out.count("0 of 32 actions") == 1
    assert trainer.tally["completions"] == 2 * 16 and trainer.tally["admissible"] == 0


GOOD = pair("ab", "ac", won=True)


@pytest.mark.parametrize(
    ("groups", "faults"),
    [
        ([GOOD], []),
        ([pair("ab", "ac"), GOOD], []),
        ([pair("ab", "ac")], [Cause.NO_REWARD]),
        ([pair("ab", "bc", reward=1.0)], [Cause.DIFFERENT_STARTS]),
        ([pair("aa", "aaa", reward=1.0)], [Cause.SINGLE_STATE]),
        ([pair("a", "a", reward=1.0)], []),
        ([pair("ab", "ab", reason="context overflow: 9 tokens")], [Cause.CONTEXT_OVERFLOW]),
        ([pair("ab", "bc"), pair("aa", "bb", outcome="error")], [Cause.DIFFERENT_STARTS, Cause.NO_REWARD]),
    ],
)
def test_faults_of_the_environment_come_in_their_order(groups, faults):
    tally = Tally.of(groups)
    assert [cause for cause in FAULTS if cause.holds(tally)] == faults
