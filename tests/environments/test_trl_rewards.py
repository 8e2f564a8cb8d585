"""TRL's `reward_funcs` and `tools` with environments in workers."""

import asyncio
import json
import math
from functools import partial

import pytest
from refusals import refused
from scripted_agents import calls
from tools_by_hand import Safe
from toy_environments import Countdown

from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure
from g2po_trl.environments.setup import played_as
from g2po_trl.environments.tools.trl_rewards import TRLEnvironment, check_reward_columns, with_rewards
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment
from g2po_trl.prompts.tool_calls import TOOL_PROMPT
from g2po_trl.runs.run_json import describe_object, load_object


class Dial(Safe):
    """As TRL's examples: state for a reward function, and no `get_reward`."""

    get_reward = None

    @property
    def reward(self):
        return float(self.turned == self.code)  # fails before `reset`

    def picture(self) -> list:
        """Look."""
        return [{"type": "image", "image": object()}, {"type": "text", "text": "a dial"}]


def opened(environments, **kwargs):
    return [environment.reward for environment in environments]


async def priced(prompts, completions, price, **kwargs):
    assert [message["role"] for message in prompts[0]] == ["system", "user"]
    return [-sum(price * len(m.get("tool_calls", ())) for m in c) for c, price in zip(completions, price)]


def never(completions, **kwargs):
    return [None for _ in completions]


def double(number: int) -> int:
    """Double a number.

    Args:
        number: which.
    """
    return 2 * number


def chat(environment_factory, *rewards, turns=9, history="conversation"):
    """Return an environment with these reward functions, their weights, and tools."""
    factory = with_rewards(environment_factory, *rewards, *[None] * (3 - len(rewards)))
    return played_as(factory, EpisodeLimits(turns), None, history)[0]


PROMPT = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Open it."}]


@pytest.mark.parametrize("history", ["window", "conversation"])
def test_weighted_rewards_of_an_episode(history):
    dial = chat(Dial, [opened, priced, never], [10, 2, 5], history=history)()
    dial.reset(code="12", price=0.5, prompt=PROMPT)
    made = [("turn", {"digit": 1}), ("turn", {"digit": 2})]
    written = [f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in made]
    assert not dial.step(calls(*made) if history == "conversation" else "".join(written)).terminated
    end = dial.step("Done.")
    assert end.reward == 10 * 1.0 + 2 * -1.0
    assert end.info["score_opened"] == 1.0 and end.info["score_priced"] == -1.0 and "score_never" not in end.info
    dial.close()


def opened_by_hand(environments, completions, **kwargs):
    assert "environments" not in kwargs and completions[0][-1]["content"] == "Done."
    return [3 * len(environment.turned) for environment in environments]


def test_the_environments_own_reward_is_added():
    safe = chat(Safe, opened_by_hand)()
    safe.reset(code="1")
    safe.step(calls(("turn", {"digit": 1})))
    end = safe.step("Done.")
    assert (end.reward, end.info["score_opened_by_hand"], end.info["score_Safe"]) == (13.0, 3.0, 10.0)
    safe.close()


def test_functions_alone_are_an_environment():
    def right(completions, answer, **kwargs):
        assert "environments" not in kwargs
        return [float(completions[0][1]["content"] == str(answer[0]))]

    tools = chat(None, right, None, [double])()
    first = tools.reset(answer=6, prompt="Double 3.")
    assert [tool["function"]["name"] for tool in first.request.tools] == ["double"]
    assert tools.step(calls(("double", {"number": 3}))).observation.text.endswith("6")
    assert tools.step("Done.").reward == 1.0
    tools.close()


def test_what_a_function_makes_is_described_in_the_worker():
    dial = chat(lambda: Dial(), opened)()
    assert "turn" in dial.reset(code="1").request.tools[-1]["function"]["name"]
    dial.close()


@pytest.mark.parametrize(
    ("reward_funcs", "action"),
    [
        (lambda completions, **kwargs: 1.0, "Done."),
        (lambda completions, **kwargs: [1.0, 2.0], "Done."),
        (never, "Done."),
        (opened, calls(("picture", {}))),  # what is no image is refused and not left out
    ],
)
def test_a_value_that_cannot_be_used_ends_the_episode_as_an_error(reward_funcs, action):
    with EnvironmentPool(chat(Dial, reward_funcs), PoolLimits(1)) as pool:
        pool.reset([{"code": "1"}])
        assert isinstance(pool.step({0: action})[0], EnvironmentFailure)


def logs(completions, log_metric, **kwargs):
    return [0.0]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((Dial, "org/reward-model", None, None), "reward_funcs"),
        ((Countdown, opened, None, None), "reward_funcs"),
        ((Countdown, None, None, [double]), "tools"),
        *(((Dial, opened, weights, None), "reward_weights") for weights in ([1.0, 2.0], [math.nan], ["2"], 1.0)),
        ((Safe, None, [1.0], None), "reward_weights"),
        ((Dial, priced, None, None), "reward_funcs"),  # there is no such column
        ((Dial, logs, None, None), "reward_funcs"),
        ((Dial, [opened, opened], None, None), "reward_funcs"),  # one name
    ],
)
def test_what_is_not_supported_is_refused_at_once(arguments, field):
    check_reward_columns(with_rewards(Dial, priced, None, None), ["price"])
    with refused(field):
        check_reward_columns(with_rewards(*arguments), ["prompt", "code"])


def test_a_run_describes_reward_functions():
    described = describe_object(with_rewards(partial(Safe), [opened_by_hand], [2.0], None))
    again = load_object(json.loads(json.dumps(described)))
    assert again.func is TRLEnvironment and again.keywords["reward_weights"] == [2.0]
    assert again.keywords["reward_funcs"][0].__name__ == "opened_by_hand"
    assert played_as(again, EpisodeLimits())[1] is TOOL_PROMPT


class Said(Dial):
    success = Dial.reward


@pytest.mark.parametrize("code", ["1", "2"])
def test_success_is_what_the_environment_says(code):
    """A reward for the format alone is above 0, too."""
    environment = chat(Said, lambda completions, **_: [0.1])()
    environment.reset(code=code)
    environment.step(calls(("turn", {"digit": 1})))
    end = environment.step("done")
    assert end.reward == 0.1 and end.info["success"] is (code == "1")
    environment.close()


class Judged(Safe):
    """Asks a judge through a client that runs a loop of its own, and forgets what it was asked for."""

    def visit(self, rooms):
        return rooms.pop()

    def get_reward(self):
        return asyncio.run(asyncio.sleep(0, self.reward))


@pytest.mark.parametrize("reward", [0.5, None, [1.0], "1"])
def test_a_reward_may_run_a_loop_and_is_a_number(reward):
    environment = ChatToolEnvironment(type("Judge", (Judged,), {"reward": reward}), 3, tool_schemas="")
    environment.reset(prompt="go")
    called = environment.step(calls(("visit", {"rooms": ["hall", "cellar"]}))).observation.request
    assert called.messages[-2]["tool_calls"][0]["function"]["arguments"] == {"rooms": ["hall", "cellar"]}
    if reward == 0.5:
        assert environment.step("done").reward == 0.5
        return
    with refused("get_reward of Judge"):
        environment.step("done")
