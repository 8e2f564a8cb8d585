"""What a run says at its end when there was nothing to learn from: said where it is so, and nowhere else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from letter_environment import BreakingEnvironment, LetterEnvironment

from g2po_trl import Observation, Step, Trajectory
from g2po_trl.credit.graph import record
from g2po_trl.runs.callbacks import ClosingVerdict
from g2po_trl.runs.metrics import Summary
from g2po_trl.runs.verdict import Fault, Tally, verdict


def episode(won=False, states=("a", "b", "c"), reward=None, outcome=None, **facts):
    outcome = outcome or ("success" if won else "failure")
    steps = [Step(state, "go", **{"admissible_actions": ["go"], **facts}) for state in states]
    return Trajectory("task", steps, 10.0 * won if reward is None else reward, outcome)


def tally_of(*groups, replaced=()):
    tally = Tally()
    tally.add(
        [[record(t) for t in group] for group in groups], Summary.of(sum(groups, [*replaced])), map(record, replaced)
    )
    return tally


LOST, WON, MIXED = [episode(), episode()], [episode(True), episode(True)], [episode(True), episode()]
ALONE = [episode(True, "axy"), episode(False, "auv")]
ERRORS = [episode(outcome="error"), episode(outcome="lost")]
MUTE, WRONG = [episode(valid=False)] * 2, [episode(admissible_actions=["stay"])] * 2


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([LOST] * 3, ["all 3 groups failed in every episode", "g2po teach"]),
        ([LOST], ["the only group failed in every episode"]),
        ([WON, WON], ["all 2 groups succeeded in every episode", "harder tasks"]),
        ([WON, LOST], ["in all 2 groups rewards were equal (2 of 4 episodes succeeded", "num_generations"]),
        ([ERRORS, ERRORS], ["all 4 episodes ended in an environment error", "g2po check"]),
        ([ERRORS, LOST], ["the only group failed in every episode"]),
        ([MUTE], ["No completion (0 of 6) had the required format"]),
        ([WRONG], ["No action (0 of 6) was among those that the environment listed", "100.0%"]),
        ([WRONG, MUTE], ["No action (0 of 12) was among", "50.0%"]),
        ([[episode(call="none", admissible_actions=None)] * 2], ["No completion (0 of 6) called a tool"]),
        ([[episode(states=())] * 2], ["No episode had a step", "failure_reason"]),
        ([ALONE, ALONE], ["all 8 steps were in a state that was visited once", "state_key"]),
    ],
)
def test_what_is_said(groups, words):
    text = str(verdict(tally_of(*groups)))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [MIXED],
        [LOST] * 9 + [MIXED],
        [[episode(reward=0.5), episode()]],  # nobody won, and one was paid more
        [[episode(True, reward=9.0), episode(True)]],  # all won, and one was paid more
        [ALONE, MIXED],
        [[episode(True, "a"), episode(False, "a")]],  # there is no later step
    ],
)
def test_nothing_is_said_where_something_could_be_learned(groups):
    assert verdict(tally_of(*groups)) is None


def test_estimators_learn_from_different_things():
    assert verdict(tally_of(ALONE), "g2po without A_EC") and verdict(tally_of(ALONE), "gigpo, value_lambda 0.5")
    assert verdict(tally_of(ALONE), "g2po without A_NC and A_EC") is None, "A_EP alone is left"
    assert verdict(tally_of(ALONE), "grpo") is None and verdict(tally_of(ALONE), "my_advantages") is None
    assert verdict(tally_of(WON, LOST), "rloo") and verdict(tally_of(WON, LOST), "ppo") is None
    assert verdict(tally_of(LOST, LOST), "ppo")
    only_format = str(verdict(tally_of(LOST, MUTE), "g2po", penalty=0.1))
    assert only_format.startswith("Nothing but the format (invalid_action_penalty) to learn from: all 2 groups failed")
    assert verdict(tally_of(MUTE), "g2po", penalty=0.1).seen.startswith("Nothing to learn from")


def test_groups_that_were_replaced_are_not_forgotten():
    assert "all 2 groups failed" in verdict(tally_of(LOST, LOST, replaced=LOST)).seen
    assert "rewards were equal" in verdict(tally_of(LOST, LOST, replaced=WON)).seen
    assert "rewards were equal" in verdict(tally_of(WON, WON, replaced=LOST)).seen


@pytest.mark.parametrize(("group", "times"), [(LOST, 1), (MIXED, 0)])
def test_it_is_said_early_too(group, times, capsys):
    """A run may take days: once after five iterations, if more follow."""
    closing, args = ClosingVerdict(tally_of(group), "g2po"), SimpleNamespace(optimizer_steps_per_iteration=2)
    for last, expected in ((10, 0), (30, times)):
        for step in range(1, last + 1):
            closing.on_log(args, SimpleNamespace(global_step=step, max_steps=last, is_world_process_zero=True), None)
        assert capsys.readouterr().out.count("After 5 iterations: Nothing to learn from: the only group") == expected


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
    said = capsys.readouterr().out
    assert said.count("all 2 groups failed in every episode") == 1
    (line,) = (line for line in said.splitlines() if line.startswith("iteration"))
    assert "| admissible  0.0% |" in line and len(line) < 150
    trainer = make_trainer(Hopeless, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert capsys.readouterr().out.count("all 4 groups failed in every episode") == 1
    assert trainer.tally.completions == 2 * 16 and trainer.tally.admissible == 0
    trainer.create_model_card()
    assert "all 4 groups failed in every episode" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_run_of_errors_says_so(make_trainer, capsys):
    make_trainer(BreakingEnvironment, max_steps=1, max_error_rate=1.0).train()
    assert capsys.readouterr().out.count("all 8 episodes ended in an environment error") == 1


def test_a_run_that_learns_says_nothing(make_trainer, capsys):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    assert trainer.tally.unequal_groups and trainer.verdict.text is None
    assert "groups" not in capsys.readouterr().out


def records(*paths, reward=0.0, outcome="failure", reason=None):
    return [
        record(Trajectory("t", [Step(state, "go") for state in path], reward, outcome, failure_reason=reason))
        for path in paths
    ]


GOOD = records("ab", "ac", reward=10.0, outcome="success")


@pytest.mark.parametrize(
    ("groups", "faults"),
    [
        ([GOOD], []),
        ([records("ab", "ac"), GOOD], []),
        ([records("ab", "ac", outcome="truncated")], []),
        ([records("ab", "ac")], [Fault.NO_REWARD]),
        ([records("ab", "bc", reward=1.0)], [Fault.DIFFERENT_STARTS]),
        ([records("aa", "aaa", reward=1.0)], [Fault.SINGLE_STATE]),
        ([records("a", "a", reward=1.0)], []),
        ([records("ab", "ab", reason="context overflow: 9 tokens")], [Fault.CONTEXT_OVERFLOW]),
        ([records("ab", "bc"), records("aa", "bb", outcome="error")], [Fault.DIFFERENT_STARTS, Fault.NO_REWARD]),
        ([], []),
    ],
)
def test_faults_of_the_environment_come_in_their_order(groups, faults):
    tally = Tally()
    tally.add(groups, Summary())
    assert tally.faults() == faults
    assert all(tally.describe(fault)[1] for fault in faults)
