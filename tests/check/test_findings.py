"""`g2po check`: each kind of finding is found in an environment that has it, and in no other."""

import os
import random
import time
from dataclasses import replace
from string import ascii_lowercase

import pytest
from mixed_games import ROWS, Lamp, Shop
from returning import played
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tools_by_hand import Safe
from toy_environments import Countdown, Dying

from g2po_trl import EnvironmentPool, Observation, PoolLimits, Step, StepResult, TextEnvironment, Trajectory
from g2po_trl.check.examine import Examination
from g2po_trl.check.findings import Finding, Kind, learns_nothing
from g2po_trl.check.measure import completion_findings, spelled_words
from g2po_trl.check.play import Played, replay_difference
from g2po_trl.check.statistics import count_in_keys, returned_share, shared_share
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.several import mixed


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
        if where == "death":
            os._exit(5)
        if where == "reset":
            time.sleep(60)
        return super().reset()

    def step(self, action):
        if action == self.where:
            time.sleep(60)
        return super().step(action)


def cut(result):
    return replace(result, terminated=False, truncated=result.terminated)


class Drifting(Walk):
    """Draws from the generator of its process, which `reset` seeds."""

    def reset(self, seed=0):
        random.seed(seed)
        return super().reset()

    def step(self, action):
        return super().step(random.choice(self.actions))


def kinds(environment, level="warning", task=None, **options):
    """Findings of a level by their kind; the texts of all can be made."""
    found = Examination(environment, [task or {"seed": 0}], **options).at_random()
    assert all(map(str, found))
    return {finding.kind: finding.facts for finding in found if finding.level == level}


@pytest.mark.parametrize(
    ("where", "failure"),
    [
        ("reset", "times out: during reset of slot 0, Stuck"),
        ("right", "times out: during step of slot 0, Stuck"),
        ("death", "crashes: the worker process of Stuck died (exit status 5)"),
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


COUNTING = "[{0.turn}] place {0.at}"


@pytest.mark.parametrize(
    ("environment", "doubts"),
    [
        # No two ways lead to the same state.
        (walk(form="path {0.path}", step=lambda *do: Walk.step(*do) and StepResult(do[0].observe())), "RARE_STATES"),
        (walk(form="dark"), {"SINGLE_STATE": {"single_states": 1}}),
        (walk(pay=0.0), {"EQUAL_REWARDS": {"low": 0, "successes": 0}, "NO_REWARD": {"rewarded": 0}}),
        (walk(actions=["left", "right", "jump"]), {"NO_EFFECT": {"count": 1, "listed": 3, "actions": ["'jump'"]}}),
        (walk(task=None), "NO_TASK"),
        (walk(step=lambda *do: cut(Walk.step(*do))), {"PAID_TRUNCATED": {"successes": 0, "high": 10}}),
        (walk(step=lambda self, action: StepResult("end", 10.0, True)), {"ALL_WON": {"successes": 8, "episodes": 8}}),
        (walk(form=COUNTING), "COUNTER"),
        (walk(form=COUNTING, actions=None), {"COUNTER": {}, "NO_ACTIONS": {}}),
    ],
)
def test_doubts(environment, doubts):
    found = kinds(environment)
    for name, facts in ({doubts: {}} if isinstance(doubts, str) else doubts).items():
        assert facts.items() <= found[Kind[name]].items(), found


def test_no_doubts():
    assert Kind.COUNTER not in kinds(walk(form=COUNTING), state_key_ignores=["numbers"])
    paid = walk(step=lambda self, action: StepResult(self.turned(), 1.0))
    assert Kind.PAID_TRUNCATED not in kinds(paid, episode_limits=EpisodeLimits(4)), "cut by the turn limit"


def test_tools_are_called_at_random_with_arguments_by_their_types():
    found = Examination(Safe, [{"code": "1"}], 40, EpisodeLimits(3)).at_random()
    assert all(finding.level != "error" for finding in found)
    (outcomes,) = (finding.facts for finding in found if finding.kind is Kind.OUTCOMES)
    assert outcomes["high"] == 10, "the digit is found"


BY_PROCESS = walk(reset=lambda self, seed: Walk.reset(self) and Observation(f"process {os.getpid()}", task="Go."))


@pytest.mark.parametrize(
    ("environment", "level", "where"),
    [
        (BY_PROCESS, "error", "in another process"),  # another start
        # Alone, it replays; in training a process plays several.
        (Drifting, "warning", "next to another episode of their process"),
    ],
)
def test_episodes_that_cannot_be_played_again(environment, level, where):
    assert kinds(environment, level)[Kind.NOT_REPLAYED]["where"] == where


def test_all_is_told_at_once():
    found = Examination(Clock, [{"seed": 0}, {"seed": 1}]).at_random()
    errors = sorted(finding.kind.name for finding in found if finding.level == "error")
    assert errors == ["RAISED_IN_STEP", "RANDOM_RESET", "REFUSED"], "each once, and not once a task"
    assert kinds(Walk, "error", {"colour": 1})[Kind.REFUSED]["error"].startswith("task 1: ")


def test_training_on_several_environments_learns_if_one_has_something_to_learn():
    won, others = Finding(Kind.ALL_WON, "warning", environment="a"), Finding(Kind.OUTCOMES, "ok")
    assert learns_nothing([won]) and not learns_nothing([won, others]) and not learns_nothing([others])


def test_tool_calls_of_a_model_are_counted():
    calls = ["none", "none", "unreadable", "unknown", None]
    episode = Trajectory("t", [Step("o", "a", call=call) for call in calls], 1.0, "success")
    every = completion_findings(Played([[episode]]), [(1, 1)])
    by = {one.kind.name: one for one in every}
    found = [by[name] for name in ("TOOL_CALLS", "READABLE_CALLS", "KNOWN_CALLS")]
    counts = [(one.level, one.facts["count"], one.facts["number"]) for one in found]
    assert counts == [("ok", 2, 4), ("warning", 1, 2), ("warning", 0, 1)]


def test_words_that_a_small_tokenizer_spells_are_named(tmp_path):
    letters = {letter: number for number, letter in enumerate(ascii_lowercase)}
    Tokenizer(BPE({**letters, "go": 26}, [("g", "o")])).save(str(tmp_path / "tokenizer.json"))
    steps = [Step("zyzzyva", "qwyjibo go", admissible_actions=["go xylem"])]
    assert spelled_words(steps, tmp_path)[0].facts["words"] == ["xylem"]
    assert sorted(spelled_words(steps, tmp_path, with_actions=True)[0].facts["words"]) == ["qwyjibo", "xylem"]
    assert spelled_words(steps, "Qwen/none") == []


def test_several_environments_are_each_examined_with_their_own_tasks_and_limits():
    games, rows = mixed({"lamp": Lamp, "shop": Shop}), [row for row in ROWS if row["environment"] != "speaker"][:4]
    limits = EpisodeLimits(6, environment_limits={"shop": {"max_tool_calls": 2}})
    found = Examination(games, rows, episodes=4, episode_limits=limits).at_random()
    by = {(finding.environment, finding.kind): finding.facts for finding in found}
    assert ("lamp", Kind.CONTRACT_KEPT) in by and by["shop", Kind.LIMIT]["limit"] == "tool call limit"
    assert ("lamp", Kind.LIMIT) not in by and {finding.level for finding in found} == {"warning", "ok"}


def test_a_replay_is_compared_with_the_episode():
    task = {"turns": 3}
    (episode,) = played(Countdown, task, ["go"] * 3)
    first, *others = episode.steps
    changes = {"observation": "x", "admissible_actions": ["stay"], "state_key": "another", "reward": 3.0}
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        assert replay_difference(pool, task, [episode]) is None
        for name, value in changes.items():
            other = replace(episode, steps=[replace(first, **{name: value}), *others])
            assert f"at step 1, {name} is" in replay_difference(pool, task, [other]).facts["difference"]
        longer = replace(episode, steps=episode.steps + [first])
        assert "ended after 'go'" in replay_difference(pool, task, [longer]).facts["difference"]
    with EnvironmentPool(Dying, PoolLimits(1)) as pool:
        assert replay_difference(pool, task | {"reward": 13.0}, [episode]).level == "error"


def visits(keys, task="t", outcome="success"):
    return Trajectory(task, [Step("", "go", state_key=key) for key in keys], 1.0, outcome)


def test_share_of_steps_in_states_of_other_episodes():
    """x is visited twice by one episode, y by two, z by one with a result and one without, and in another group."""
    groups = [[visits("xyxz"), visits("y"), visits("z", outcome="error")], [visits("z")]]
    assert shared_share(groups) == 2 / 6 and shared_share(groups, lambda step: "") == 5 / 6 and shared_share([]) == 0


COUNTED = [["hall 1", "cellar 2", "hall 3"], ["hall 1"], ["hall 1", "hall 2"]]
SUMS = [[f"sum {number}" for number in numbers] for numbers in ([2, 9, 12, 20], [2, 12, 19], [2, 5, 9])]


@pytest.mark.parametrize(
    ("keys", "share", "counts"),
    [
        (COUNTED, 0, "0% of steps return to a state of their episode, and 67% would if keys had no numbers, as "),
        (SUMS, 0, None),  # of cards: reached at different turns, in a counter's place they would be left out
        ([["room 1", "room 2", "room 1"]], 1 / 2, None),  # with numbers, and one returns to them
        ([["@   G", " @  G", "  @ G", "   @G"]], 0, None),  # spaces are no numbers
        ([["hall 1"]], None, None),
    ],
)
def test_a_number_that_makes_every_state_of_an_episode_new(keys, share, counts):
    assert returned_share(map(visits, keys)) == share
    found = count_in_keys(list(map(visits, keys)))
    assert found == (counts and f"{counts}'hall 1' and 'hall 3'")
