"""`g2po check`: each kind of finding is found in an environment that has it, and in no other."""

import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
from letter_environment import LetterEnvironment
from mixed_games import ROWS, Lamp, Shop, speaker
from tools_by_hand import Safe
from toy_environments import Countdown, Forgetful
from transformers import AutoTokenizer

from g2po_trl import Observation, PoolLimits, Step, StepResult, TextEnvironment, Trajectory
from g2po_trl.check.examine import Examination
from g2po_trl.check.findings import Finding, Kind, learns_nothing, worst_first
from g2po_trl.check.measure import agent_findings, completion_findings, recurrence_by_key, spelled_words
from g2po_trl.check.play import Played, random_arguments
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.setup import agent_factory
from g2po_trl.prompts.state_keys import workspace_key
from g2po_trl.runs.verdict import FAULTS


class Walk(TextEnvironment):
    """Left or right on a line of five; the right end pays."""

    actions, form, task, pay = ["left", "right"], "place {0.at}", "Go right.", 10.0

    def reset(self, seed=0):
        self.at, self.turn, self.path = 2, 0, ""
        return self.observe()

    def turned(self):
        self.turn += 1
        return self.observe()

    def observe(self):
        return Observation(self.form.format(self), admissible_actions=self.actions, task=self.task)

    def step(self, action):
        self.at += {"left": -1, "right": 1}.get(action, 0)
        self.path += action[:1]
        return StepResult(self.turned(), self.pay * (self.at == 4), terminated=self.at in (0, 4))


def walk(**changes):
    return type("Changed", (Walk,), changes)


class Picky(Walk):
    """Takes actions apart as if they were its own, as language models write it."""

    actions = ["go left 1", "go right 1"]

    def step(self, action):
        words = action.split(" ")
        number = int(words[-1])
        return super().step(words[1] if number else "left")


class Clock(Walk):
    """Three faults in one: random starts, a reward that is none, and an exception far from the start."""

    form = "{0.started} {0.at}"

    def reset(self, seed=0):
        self.started = os.urandom(4).hex()
        return super().reset()

    def step(self, action):
        if self.at == 3:
            raise RuntimeError("stuck")
        result = super().step(action)
        return StepResult(result.observation, float("nan") if action == "" else 0.0, result.terminated)


class Stuck(Walk):
    """Hangs, or dies, where the task says."""

    def reset(self, where):
        self.where = where
        return self.suffer("reset") or super().reset()

    def step(self, action):
        self.suffer(f"step {action}")
        return super().step(action)

    def suffer(self, here):
        if here == self.where:
            time.sleep(60)
        if f"death in {here}" == self.where:
            os._exit(5)


def cut(result):
    return replace(result, terminated=False, truncated=result.terminated)


class Drifting(Walk):
    """Draws from the generator of its process, which `reset` seeds."""

    def reset(self, seed=0):
        random.seed(seed)
        return super().reset()

    def step(self, action):
        return super().step(random.choice(self.actions))


class Shared(Walk):
    """Its episodes write into one list."""

    form, visits = "{0.visits}", []

    def reset(self, seed=0):
        self.visits.clear()
        return super().reset()

    def step(self, action):
        self.visits.append(self.at)
        return super().step(action)


def kinds(environment, level="warning", task=None, **options):
    """Findings of a level by their kind; the texts of all can be made."""
    found = Examination(environment, [task or {"seed": 0}], **options).at_random()
    assert all(map(str, found))
    return {finding.kind: finding.facts for finding in found if finding.level == level}


def episode(*steps, reward=1.0, outcome="success", **fields):
    return Trajectory("t", list(steps), reward, outcome, **fields)


@pytest.mark.parametrize(
    ("where", "failure"),
    [
        ("reset", "times out: during reset of slot 0, Stuck"),
        ("step no such action", "times out: during step of slot 1, Stuck"),
        ("step right", "times out: during step of slot 0, Stuck"),
        ("death in reset", "crashes: the worker process of Stuck died (exit status 5)"),
    ],
)
def test_what_hangs_or_dies_is_named(where, failure):
    """And `check` neither hangs nor dies of it."""
    limits = PoolLimits(environment_reset_timeout=2, environment_step_timeout=2)
    found = kinds(Stuck, "error", {"where": where}, limits=limits)
    assert found.keys() == {Kind.FAILED} and found[Kind.FAILED]["failure"].startswith(failure)


def test_nothing_is_wrong_with_a_good_environment():
    found = Examination(Walk, [{"seed": 0}, {"seed": 1}]).at_random()
    assert {finding.level for finding in found} == {"ok"}
    facts = {finding.kind: finding.facts for finding in found}
    assert facts.keys() == {Kind.CONTRACT_KEPT, Kind.RECURRENCE, Kind.OUTCOMES}
    assert (facts[Kind.OUTCOMES]["low"], facts[Kind.OUTCOMES]["high"]) == (0, 10)


@pytest.mark.parametrize(
    ("environment", "kind", "facts"),
    [
        # No two ways lead to the same state.
        (
            walk(form="path {0.path}", step=lambda *do: Walk.step(*do) and StepResult(do[0].observe())),
            Kind.RARE_STATES,
            {},
        ),
        (walk(form="dark"), Kind.SINGLE_STATE, {"single_states": 1}),
        (walk(pay=0.0), Kind.EQUAL_REWARDS, {"low": 0, "successes": 0}),
        (walk(pay=0.0), Kind.NO_REWARD, {"rewarded": 0}),
        (walk(actions=["left", "right", "jump"]), Kind.NO_EFFECT, {"count": 1, "listed": 3, "actions": ["'jump'"]}),
        (walk(task=None), Kind.NO_TASK, {}),
        (walk(step=lambda *do: cut(Walk.step(*do))), Kind.PAID_TRUNCATED, {"successes": 0, "high": 10}),
        (LetterEnvironment, Kind.NO_ACTIONS, {}),
        (walk(step=lambda self, action: StepResult("end", 10.0, True)), Kind.ALL_WON, {"successes": 8, "episodes": 8}),
        (walk(form="[{0.turn}] place {0.at}"), Kind.COUNTER, {}),
        (walk(form="[{0.turn}] place {0.at}", actions=None), Kind.COUNTER, {}),
    ],
)
def test_doubts(environment, kind, facts):
    found = kinds(environment)
    assert facts.items() <= found[kind].items(), found


def test_a_counter_that_keys_leave_out_is_no_doubt():
    assert Kind.COUNTER not in kinds(walk(form="[{0.turn}] place {0.at}"), state_key_ignores=["numbers"])
    pages = walk(form="[{0.turn}] a page", step=lambda self, action: StepResult(self.turned(), 0.0, self.turn == 6))
    assert Kind.COUNTER not in kinds(pages), "without its number a task has one state only"


def test_tools_are_called_at_random_with_arguments_by_their_types():
    found = Examination(Safe, [{"code": "1"}], 40, EpisodeLimits(3)).at_random()
    assert all(finding.level != "error" for finding in found)
    (outcomes,) = (finding.facts for finding in found if finding.kind is Kind.OUTCOMES)
    assert outcomes["high"] == 10, "the digit is found"
    mumbling = type("Mumbling", (Safe,), {"kick": lambda self, where: None})
    assert "the tool kick" in kinds(mumbling, "error", {"code": "1"})[Kind.REFUSED]["error"]


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (True, set("abcdefgh")),
        ({"const": 3}, {3}),
        ({"enum": ["x"]}, {"x"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {None, *range(10)}),
    ],
)
def test_random_arguments_are_of_their_schemas(schema, values):
    """Agents describe their tools themselves; of optional arguments, pydantic gives `anyOf`."""
    rng = random.Random(0)
    drawn = [random_arguments({"parameters": {"properties": {"a": schema}}}, rng)["a"] for _ in range(200)]
    assert set(drawn) == values
    assert random_arguments({"name": "look"}, rng) == random_arguments({"parameters": None}, rng) == {}


def test_whether_states_can_be_returned_to():
    assert Kind.CONTRACT_KEPT in kinds(Countdown, "ok", {"turns": 8}, episodes=1)
    forgetful = kinds(Forgetful, "warning", {"turns": 8}, episodes=1)[Kind.NOT_REPLAYED]
    assert forgetful["difference"].startswith("at step 8, observation is 'left 1 at")
    by_process = walk(reset=lambda self, seed: Walk.reset(self) and Observation(f"process {os.getpid()}", task="Go."))
    assert kinds(by_process, "error").keys() == {Kind.NOT_REPLAYED}, "another start is an error"


@pytest.mark.parametrize("environment", [Drifting, Shared])
def test_episodes_that_disturb_each_other(environment):
    """Alone, each replays; in training a process plays several."""
    found = kinds(environment)[Kind.NOT_REPLAYED]
    assert found["where"] == "beside another episode of their process"


def test_a_reward_where_the_turn_limit_ends_the_episode_is_no_doubt():
    paid = walk(step=lambda self, action: StepResult(self.turned(), 1.0))
    assert Kind.PAID_TRUNCATED not in kinds(paid, episode_limits=EpisodeLimits(4))


def test_actions_that_are_nearly_admissible():
    """And the line of the user's code is named, not the line of what plays it."""
    source = Path(__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(source) if "int(words[-1])" in text)
    module = sys.modules[__name__]
    cloudpickle.unregister_pickle_by_value(module)  # pickled by value, code forgets its file
    try:
        found = kinds(Picky, "error")
    finally:
        cloudpickle.register_pickle_by_value(module)
    assert found[Kind.RAISED_IN_STEP]["error"].startswith("ValueError: invalid literal for int()")
    assert found[Kind.RAISED_IN_STEP]["where"].endswith(f"{Path(__file__).name}, line {line}")


def test_all_is_told_at_once():
    found = Examination(Clock, [{"seed": 0}, {"seed": 1}]).at_random()
    errors = sorted(finding.kind.name for finding in found if finding.level == "error")
    assert errors == ["RAISED_IN_STEP", "RANDOM_RESET", "REFUSED"], "each once, and not once a task"
    assert kinds(Walk, "error", {"colour": 1})[Kind.REFUSED]["error"].startswith("task 1: ")


def test_each_fault_that_the_diagnosis_of_training_names_is_a_kind():
    assert {cause.name for cause in FAULTS} <= Kind.__members__.keys()


def test_training_on_several_environments_learns_if_one_has_something_to_learn():
    won, others = Finding(Kind.ALL_WON, "warning", environment="a"), Finding(Kind.OUTCOMES, "ok")
    assert learns_nothing([won]) and not learns_nothing([won, others]) and not learns_nothing([others])
    assert worst_first([others, won, won]) == [won, others]


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([None, None], [None, None, None]),
        (["none", "none", "unreadable", "unknown", None], [("ok", 2, 4), ("warning", 1, 2), ("warning", 0, 1)]),
        (["known", "known", "none"], [("ok", 2, 3), ("ok", 2, 2), ("ok", 2, 2)]),
        (["none"], [("warning", 0, 1), None, None]),
    ],
)
def test_tool_calls_of_a_model_are_counted(calls, found):
    played = Played([[episode(*[Step("o", "a", call=call) for call in calls])]])
    every = completion_findings(played, [(1, 1)])
    counts = {one.kind: (one.level, one.facts.get("count"), one.facts.get("number")) for one in every}
    assert [counts.get(kind) for kind in (Kind.TOOL_CALLS, Kind.READABLE_CALLS, Kind.KNOWN_CALLS)] == found


def test_an_agent_that_raises_in_its_first_call_is_not_one_of_a_single_call():
    broken = episode(Step("o", "a"), outcome="failure", info={"failure_reason": "agent error: KeyError: 'x'"})
    (found,) = agent_findings(Played([[broken, broken]]), 9)
    assert (found.kind, found.level, found.facts["error"]) == (Kind.RAISED_IN_AGENT, "error", "KeyError: 'x'")
    assert [found.kind for found in agent_findings(Played([[episode(Step("o", "a"))]]), 9)] == [Kind.ONE_CALL]


def test_words_that_a_small_tokenizer_spells_are_named(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    known = next(word for word in sorted(tokenizer.get_vocab()) if word.isalpha() and len(word) > 3)
    steps = [Step("zyzzyva", f"qwyjibo {known}", admissible_actions=[f"{known} xylem"])]
    assert spelled_words(steps, tiny_model_dir)[0].facts["words"] == ["xylem"]
    assert sorted(spelled_words(steps, tiny_model_dir, with_actions=True)[0].facts["words"]) == ["qwyjibo", "xylem"]
    assert spelled_words(steps, "Qwen/none") == []


def test_states_of_a_workspace_recur_where_their_news_do_not():
    def played(*seen):
        steps = []
        for number, (files, seconds) in enumerate(seen):
            text = f"call {number} took {seconds}"
            key = workspace_key(files, [{"role": "user", "content": text}], None, "/f")
            steps.append(Step(f"user: {text}", "", state_key=key))
        return episode(*steps)

    group = [played(("a", "1.0 s"), ("b", "2.0 s")), played(("a", "1.1 s"), ("c", "2.1 s"))]
    (found,) = recurrence_by_key(Played([group]))
    assert found.level == "ok" and found.facts == {"used": 0.5, "news": 0.0, "normalised": 1.0}
    assert recurrence_by_key(Played([group[:1]])) == [], "nothing to compare"


def test_several_environments_are_each_examined_with_their_own_tasks_and_limits():
    games = agent_factory({"speaker": speaker}, 9, environment_factory={"lamp": Lamp, "shop": Shop})
    limits = EpisodeLimits(6, max_tool_calls=2, environment_limits={"speaker": {"max_requests": 1}})
    found = Examination(games, ROWS[:6], episodes=4, episode_limits=limits).at_random()
    by = {(finding.environment, finding.kind): finding.facts for finding in found}
    assert ("lamp", Kind.CONTRACT_KEPT) in by and by["shop", Kind.LIMIT]["limit"] == "tool call limit"
    assert by["speaker", Kind.LIMIT] == {"count": 8, "episodes": 8, "limit": "request limit"}
    assert not any(finding.level == "error" for finding in found)
    for rows, word in (([*ROWS[:3], {"environment": "lamb"}], "'lamb'"), (ROWS[:2], "'speaker'")):
        (error,) = Examination(games, rows, episodes=2).at_random()
        assert (error.level, error.kind) == ("error", Kind.REFUSED) and word in error.facts["error"]
