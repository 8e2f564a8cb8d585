"""What an episode may use: each limit ends it as a failure with a reason, in the pool, and errors stay errors."""

from functools import partial

import pytest
from mixed_games import Shop
from refusals import refused
from scripted_actors import ScriptedActor
from scripted_agents import ask
from toy_environments import Countdown, Slow

from g2po_trl import AgentEnvironment, EnvironmentPool, EpisodeLimits, G2POConfig, Player, PoolLimits
from g2po_trl.environments.setup import played_as
from g2po_trl.environments.several import check_limits, mixed
from g2po_trl.environments.tools.trl_rewards import TRLEnvironment
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment, ToolEnvironment
from g2po_trl.prompts.conversation import response_action
from g2po_trl.runs.metrics import summarize

LONG = [{"turns": 99}]
CALL = {"type": "function", "function": {"name": "buy", "arguments": {"thing": "mug"}}}


def answer(episodes, tokens=0, words=("go",) * 99, number_of_calls=0):
    """Steps as a model's: with tokens, or with calls of tools where a request asks."""
    steps, ids = [], [0] * tokens
    for episode in episodes:
        request = episode.observation.request
        if request is None:
            steps.append(episode.step(words[episode.turns], "", completion_ids=ids))
        else:
            message = {"role": "assistant", "content": "x"}
            message |= {"tool_calls": [CALL] * number_of_calls} if number_of_calls else {}
            action = response_action(message)
            steps.append(episode.step(action, "", messages=list(request.messages), completion_ids=ids))
    return steps


def play(factory, limits, tasks, history="conversation", **script):
    factory = played_as(factory, limits, None, history)[0]
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        return Player(pool, ScriptedActor(partial(answer, **script)), limits).play(tasks)[0]


@pytest.mark.parametrize(
    ("most", "turns", "outcome", "steps", "reason"),
    [
        (10, 99, "failure", 3, "token limit: 12 tokens, more than max_episode_tokens=10"),
        (36, 99, "truncated", 9, None),
        (10, 3, "success", 3, None),
    ],
)
def test_tokens(most, turns, outcome, steps, reason):
    """The step that exceeds it is played, and turns end as before."""
    (trajectory,) = play(Countdown, EpisodeLimits(9, max_episode_tokens=most), [{"turns": turns}], tokens=4)
    assert (trajectory.outcome, len(trajectory.steps), trajectory.failure_reason) == (outcome, steps, reason)


def test_tool_calls():
    limits = EpisodeLimits(9, max_tool_calls=4)
    (trajectory,) = play(Shop, limits, [{"goal": "mug", "prompt": "x"}], number_of_calls=2)
    assert (trajectory.outcome, len(trajectory.steps), trajectory.reward) == ("failure", 3, 1.0), "the mug was bought"
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 1.0]
    assert trajectory.failure_reason.startswith("tool call limit: 6 tool calls")
    assert [step.tool_calls for step in trajectory.steps] == [2, 2, 2]
    (trajectory,) = play(Shop, EpisodeLimits(9, max_tool_calls=0), [{"goal": "mug", "prompt": "x"}])
    assert trajectory.success, "a text without calls ends it"


class Down(Shop):
    def get_reward(self):
        raise ConnectionError("down")


def test_turns_of_tools_that_have_more():
    factory = partial(ChatToolEnvironment, Shop, 99)
    (trajectory,) = play(factory, EpisodeLimits(3), [{"goal": "mug", "prompt": "x"}], number_of_calls=2)
    assert (trajectory.outcome, [step.reward for step in trajectory.steps]) == ("success", [0.0, 0.0, 1.0])
    (trajectory,) = play(Down, EpisodeLimits(9, max_tool_calls=4), [{"prompt": "x"}], number_of_calls=2)
    assert (trajectory.outcome, trajectory.failure_reason, trajectory.info) == ("error", None, {})


def test_an_empty_completion_is_no_limit():
    given = []

    def pay(completions, **columns):
        given.extend(completions)
        return [1.0]

    environment = ToolEnvironment(partial(TRLEnvironment, Shop, [pay]), 9)
    environment.reset(goal="mug")
    assert environment.step("").terminated and given == [[{"role": "assistant", "content": ""}]]


def test_calls_in_prose_are_counted():
    words = ('<tool_call>{"name": "buy", "arguments": {"thing": "x"}}</tool_call>' * 3,) * 9
    limits = EpisodeLimits(9, max_tool_calls=2)
    (trajectory,) = play(Shop, limits, [{"goal": "mug"}], "window", words=words)
    assert trajectory.failure_reason.startswith("tool call limit: 3 tool calls") and len(trajectory.steps) == 1
    assert trajectory.reward == 0.25 and trajectory.final_observation.endswith("you have 3")


def test_seconds_of_the_environment_are_a_failure_and_a_hanging_step_is_an_error():
    limits = EpisodeLimits(9, max_episode_seconds=0.3)
    (slow,) = play(partial(Slow, 0.2), limits, LONG)
    (quick,) = play(Countdown, limits, LONG)
    assert (slow.outcome, len(slow.steps), quick.outcome) == ("failure", 2, "truncated")
    assert slow.failure_reason.startswith("time limit: 0.")
    with EnvironmentPool(partial(Slow, 30.0), PoolLimits(1, environment_step_timeout=0.5)) as pool:
        (hung,), _ = Player(pool, ScriptedActor(answer), limits).play(LONG)
    assert hung.outcome == "error" and hung.error.startswith("timeout")


def talker(task, client):
    for _ in range(task["requests"]):
        ask(client, "hello")
    return 1.0


def test_requests_of_an_agent():
    limits = EpisodeLimits(9, max_requests=4)
    few, many = play(partial(AgentEnvironment, agent=talker, max_turns=9), limits, [{"requests": 4}, {"requests": 6}])
    assert few.success and many.failure_reason.startswith("request limit") and len(many.steps) == 4


def test_limits_by_environment():
    own = {"walk": {"max_turns": 3, "max_episode_tokens": 99}}
    limits = EpisodeLimits(9, max_tool_calls=0, environment_limits=own)
    tasks = [{"environment": "walk", "turns": 99}, {"environment": "shop", "goal": "mug", "prompt": "x"}]
    walk, shop = play(mixed({"walk": Countdown, "shop": Shop}), limits, tasks, tokens=8, number_of_calls=1)
    assert (walk.environment, walk.outcome, len(walk.steps)) == ("walk", "truncated", 3)
    assert (shop.environment, shop.outcome, len(shop.steps)) == ("shop", "failure", 1)
    assert limits.most_turns == 9 and limits.by("walk").max_tool_calls == 0
    summary = summarize([walk, shop])
    assert summary["failure_reasons"] == {"tool call limit": 1} and summary["by_environment"]["walk"]["turns"] == 3
    assert summary["success_rate_by_type"] == {"shop": 0.0, "walk": 0.0}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_turns", 0, None),
        ("max_episode_tokens", 0, None),
        ("max_tool_calls", -1, None),
        ("max_requests", 1.5, None),
        ("max_episode_seconds", 0.0, None),
        ("environment_limits", {"lamp": {"max_turn": 4}}, "environment_limits['lamp']"),
        ("environment_limits", {"lamp": 4}, "environment_limits['lamp']"),
        ("environment_limits", {"lamp": {"max_turns": "4"}}, "max_turns"),
        ("environment_limits", "lamp", None),
    ],
)
def test_values_are_checked_where_they_are_given(field, value, named):
    with refused(named or field):
        EpisodeLimits(**{field: value})


def test_they_are_options_of_a_run(tmp_path):
    args = G2POConfig(str(tmp_path), max_tool_calls=3, environment_limits='{"a": {"max_turns": 2}}', bf16=False)
    limits = EpisodeLimits.of(args)
    assert (limits.max_turns, limits.max_tool_calls, limits.by("a").max_turns) == (50, 3, 2)
    with refused("environment_limits['a']"):
        check_limits(limits, Countdown)
    check_limits(EpisodeLimits(max_requests=3), mixed({"game": Countdown, "agent": partial(AgentEnvironment, print)}))
    with refused("max_requests"):
        check_limits(EpisodeLimits(max_requests=3), mixed({"game": Countdown}))
