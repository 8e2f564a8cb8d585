"""The multi-turn loop, with a scripted model and real environment workers."""

import pytest
from scripted_actors import TEMPLATE, ScriptedEngine, ScriptedStream, play_scripted
from toy_environments import Countdown, Overwhelming

from g2po_trl import EnvironmentPool, EpisodeLimits, Player, PoolLimits, StepResult, Trajectory
from g2po_trl.engines.base import Completion
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.runs.metrics import summarize


@pytest.fixture(params=[ScriptedEngine, ScriptedStream], ids=["turns", "streams"])
def play(request, encode):
    """Plays with an engine that is asked once a turn, and with one that is asked one by one."""

    def play(tasks, environment=Countdown, **options):
        return play_scripted(request.param, encode, tasks, environment, lambda prompt: "go<|im_end|>", **options)

    return play


def test_only_live_episodes_are_generated_and_stepped(play, request):
    trajectories, stats, calls = play([{"turns": n} for n in (1, 3, 2, 9)])
    streams = "streams" in request.node.name
    assert [len(prompts) for prompts in calls] == ([1] * 10 if streams else [4, 3, 2, 1])
    assert [len(t.steps) for t in trajectories] == [1, 3, 2, 4]
    assert [t.outcome for t in trajectories] == ["success", "success", "success", "truncated"]
    assert [t.reward for t in trajectories] == [10, 10, 10, 0]
    assert stats.num_steps == 10 and stats.turns == 4 and stats.active_fraction == 10 / 16
    assert trajectories[1].final_observation == "left 0"


@pytest.mark.parametrize("number", [0, 2, 4])
def test_an_engine_that_returns_another_number_of_completions_is_named(encode, number):
    """Instead of asking it again for ever, or giving an episode another one's completion."""
    completion = Completion(encode.tokenizer("go")["input_ids"])
    with EnvironmentPool(Countdown, PoolLimits(1)) as pool:
        engine = ScriptedEngine(encode.tokenizer, lambda prompts: [completion] * number)
        with pytest.raises(RuntimeError, match="ScriptedEngine.generate"):
            Player(pool, PromptActor(engine, encode, TEMPLATE), EpisodeLimits(4)).play([{"turns": 2}] * 3)


ENDINGS = [
    (0.0, {}, "failure"),
    (0.5, {}, "success"),
    (0.5, {"success": False}, "failure"),
    (0.0, {"success": True}, "success"),
    (1.0, {"truncates": True}, "truncated"),
    (1.0, {"truncates": True, "success": True}, "truncated"),
    (0.5, {"success": False, "failure_reason": "own loop: 100 s"}, "failure"),
    (0.0, {"failure_reason": "own loop: 100 s", "truncates": True}, "truncated"),
]


def test_who_says_what_success_is(play):
    trajectories, _, _ = play([{"turns": 1, "reward": reward, **facts} for reward, facts, _ in ENDINGS])
    for trajectory, (reward, facts, outcome) in zip(trajectories, ENDINGS, strict=True):
        assert (trajectory.outcome, trajectory.reward) == (outcome, reward)
        assert trajectory.failure_reason == facts.get("failure_reason")


def test_steps_hold_what_the_engine_read_and_wrote(play, encode):
    (trajectory,), _, calls = play([{"turns": 4}])
    for turn, step in enumerate(trajectory.steps):
        assert step.prompt_ids == calls[turn][0]
        assert step.completion_ids == encode.tokenizer("go<|im_end|>")["input_ids"]
        assert (step.completion, step.action, step.valid) == ("go", "go", True)
        assert (step.observation, step.state_key) == (f"left {4 - turn}", f"k{4 - turn}")
        assert "TASK" in encode.tokenizer.decode(step.prompt_ids), "the task is in every prompt"
    last = encode.tokenizer.decode(trajectory.steps[3].prompt_ids)
    assert "left 3" in last and "left 2" in last and "left 4" not in last, "history_length is 2"


def test_prompts_over_the_limit_are_cut_and_counted(play, encode):
    (trajectory,), _, calls = play([{"turns": 4}])
    limit = max(len(prompts[0]) for prompts in calls) - 1
    (cut,), stats, calls = play([{"turns": 4}], max_prompt_length=limit)
    assert all(len(prompts[0]) <= limit for prompts in calls)
    assert stats.truncated_prompts == sum(step.prompt_truncated for step in cut.steps) > 0
    assert all("TASK" in encode.tokenizer.decode(step.prompt_ids) for step in cut.steps)


def test_a_prompt_that_cannot_fit_is_a_failure_of_the_agent(play):
    """It stays in the denominator: half the tasks unplayable are a success rate of one half, not of one."""
    tasks = [{"actions": 1}, {"actions": 2}, {"actions": 100}, {"actions": 1}]
    trajectories, _, calls = play(tasks, Overwhelming, max_turns=1, max_prompt_length=150)
    failed, *others = trajectories[2], *trajectories[:2], trajectories[3]
    assert (failed.outcome, failed.steps) == ("failure", [])
    assert [(t.outcome, len(t.steps)) for t in others] == [("truncated", 1)] * 3
    assert failed.error is None and failed.failure_reason.startswith("prompt too long: ")
    assert all(len(prompt) <= 150 for prompts in calls for prompt in prompts)
    summary = summarize([*trajectories[:3], Trajectory("x", [], 1.0, "success")])
    assert summary["success_rate"] == 0.25 and summary["error_rate"] == 0 and summary["episodes"] == 4
    assert summary["failure_reasons"] == {"prompt too long": 1}


def test_a_prompt_that_grows_too_long_keeps_what_was_played(play):
    (trajectory,), _, calls = play([{"actions": 1}], Overwhelming, max_prompt_length=150)
    assert (trajectory.outcome, trajectory.reward, len(trajectory.steps), len(calls)) == ("failure", 1.0, 1, 1)
    assert "max_prompt_length=150" in trajectory.failure_reason and trajectory.steps[0].completion_ids


class Reporting(Countdown):
    """Tells a score at each step, and after the second that it has won."""

    def step(self, action):
        result = super().step(action)
        info = {"score": 10 - self.left, "success": self.left <= 7}
        return StepResult(result.observation, result.reward, result.terminated, result.truncated, info)


def test_facts_of_the_last_step_count_where_the_turn_limit_ends_the_episode(play):
    """The environment ended one episode of two: the other's score is not 0. Nor does it succeed by what it says."""
    trajectories, _, _ = play([{"turns": 3}, {"turns": 9}], environment=Reporting)
    assert [t.info["score"] for t in trajectories] == [10, 5]
    assert [t.outcome for t in trajectories] == ["success", "truncated"]
    assert summarize(trajectories)["score"] == 7.5
