"""TRL's classes with tools, `reward_funcs` and `tools` with environments in workers."""

import asyncio
import json
import math
import random
from pathlib import Path

import pytest
from datasets import Dataset
from letter_trainer import make_config, played_in
from refusals import refused
from returning import check_played_again
from scripted_agents import calls
from tools_by_hand import Safe, Telephone
from toy_environments import Countdown

from g2po_trl import (
    EnvironmentPool,
    G2POTrainer,
    PoolLimits,
    PromptTemplate,
    TextEnvironment,
    ToolEnvironment,
)
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure
from g2po_trl.environments.setup import played_as
from g2po_trl.environments.tools.trl_rewards import check_reward_columns, with_rewards
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment
from g2po_trl.environments.validation import constructed
from g2po_trl.prompts.template import ParsedCompletion
from g2po_trl.prompts.tool_calls import parse_tool_calls

LIMITS = EpisodeLimits(9)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def in_window(made, limits=LIMITS):
    return played_as(made, limits, history="window")[0]


def a_digit(completion, prompt_end=""):
    """What a random model can say: some letter, read as a turn of the dial to 1 or 2."""
    digit = 1 if completion[:1].lower() <= "m" else 2
    return ParsedCompletion(call("turn", digit=digit), True)


def test_completions_are_read():
    assert parse_tool_calls(f"I think. {call('turn', digit=1)} Well.") == (call("turn", digit=1), True)
    assert parse_tool_calls("  done ") == ("done", True) and parse_tool_calls("") == ("", False)
    for broken in ("turn 1</tool_call>", "{}</tool_call>", "{", "[1]</tool_call>"):
        assert not parse_tool_calls(f"<tool_call>{broken}").valid


def test_an_episode_by_hand():
    safe = ToolEnvironment(Safe, max_turns=10)
    prompt = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Open it."}]
    first = safe.reset(code="12", prompt=prompt)
    assert first.text == "The safe is locked." and first.task.endswith("Be quick.\n\nOpen it.")
    assert '"name": "turn"' in first.task and '"digit"' in first.task and "listen" in first.task
    assert "get_reward" not in first.task and '"close"' not in first.task
    assert safe.step(call("turn", digit=1)).observation.text == "click"
    assert safe.step(call("listen") + call("turn", digit=2)).observation.text == "1 digits\nclick"
    for bad, message in (
        (call("kick"), "Tool kick not found."),
        (call("turn", where=1), "unexpected keyword argument"),
        ("<tool_call>turn</tool_call>", "the call cannot be read"),
    ):
        answer = safe.step(bad)
        assert message in answer.observation.text and not answer.terminated and answer.reward == 0
    end = safe.step("It is open.")
    assert (end.reward, end.terminated, end.info) == (10.0, True, {"success": True, "out_of_turns": False})
    safe.close()
    assert safe.inner.closed


def test_a_connection_lives_in_tools_and_the_environments_own_failure_is_no_answer_to_the_model():
    with EnvironmentPool(in_window(Telephone), PoolLimits(1)) as pool:
        first, _ = pool.reset([{}, {}])
        assert first.text == "It rings." and '"name": "say"' in first.task
        assert "torch" not in Path(f"/proc/{pool.worker_pids[0]}/maps").read_text(), "to describe tools"
        for word in ("hello", "again"):
            assert pool.step({0: call("say", word=word)})[0].observation.text == word.upper()
        failures = pool.step({0: call("say", word="…"), 1: call("say", word="!")})
        assert [isinstance(failures[slot], EnvironmentFailure) for slot in range(2)] == [True] * 2


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: ToolEnvironment(Dial, 3), "get_reward of Dial"),
        (lambda: ToolEnvironment(type("NoTool", (), {"get_reward": lambda self: 0.0}), 3), "the tools of NoTool"),
        (lambda: in_window(type("Mumbling", (Safe,), {"kick": lambda self, where: None})), "kick"),
        (lambda: played_as(type("Bad", (TextEnvironment,), {"prompt_template": "x"}), LIMITS), "prompt_template"),
        (lambda: constructed(lambda: Safe(), "it"), "step"),
    ],
)
def test_what_is_missing_is_refused_by_its_field(call, field):
    with refused(field):
        call()


def test_several_calls_are_played_again():
    """Also those of the last turn; and failed calls change nothing."""
    two = call("turn", digit=1) + call("listen")
    actions = [two, call("turn", where=2), two, call("turn", digit=2)]
    episode = check_played_again(in_window(Safe, EpisodeLimits(4)), {"code": "112"}, actions, 4)
    assert [episode.steps[place].observation for place in (1, 3)] == ["click\n1 digits", "click\n2 digits"]
    assert episode.reward == 10.0 and len(episode.steps) == 4 and episode.info["out_of_turns"]


class Dial(Safe):
    """As TRL's examples: state for a reward function, no `get_reward`, and `reset` draws."""

    prompt_template = PromptTemplate(first="{observation}", later="{history} {observation}", parse_completion=a_digit)
    get_reward = None

    @property
    def reward(self):
        return float(self.turned == self.code)  # fails before `reset`

    def reset(self, **row):
        return f"{super().reset(**row)} It has number {random.random()}."

    def picture(self) -> list:
        """Look."""
        return [{"type": "image", "image": object()}, {"type": "text", "text": "a dial"}]


def opened(environments, **kwargs):
    return [environment.reward for environment in environments]


def test_it_trains_with_reward_functions_and_draws_are_noticed(tmp_path, tiny_model_dir, capsys):
    def turns(environments, **kwargs):
        return [len(safe.turned) for safe in environments]

    trainer = G2POTrainer(
        str(tiny_model_dir),
        make_config(tmp_path / "out", max_steps=2, max_turns=2, max_prompt_length=None, reward_weights=[10.0, -1.0]),
        Dataset.from_list([{"code": code, "prompt": "Open the safe."} for code in ("11", "12", "21", "22")]),
        environment_factory=Dial,
        reward_funcs=[opened, turns],
    )
    trainer.train()
    trainer.close()
    played = played_in(trainer)
    assert [t.reward for t in played] == [10 * t.info["score_opened"] - t.info["score_turns"] for t in played]
    assert {t.info["score_turns"] for t in played} == {2.0}
    assert "After 1 iterations: 2 of 2 groups began in different states" in capsys.readouterr().out


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
    written = "".join(call(name, **arguments) for name, arguments in made)
    assert not dial.step(calls(*made) if history == "conversation" else written).terminated
    end = dial.step("Done.")
    assert end.reward == 10 * 1.0 + 2 * -1.0
    assert end.info["score_opened"] == 1.0 and end.info["score_priced"] == -1.0 and "score_never" not in end.info
    dial.close()


def opened_by_hand(environments, completions, **kwargs):
    assert "environments" not in kwargs and completions[0][-1]["content"] == "Done."
    return [3 * len(environment.turned) for environment in environments]


@pytest.mark.parametrize("made", [Safe, lambda: Safe()])
def test_the_environments_own_reward_is_added(made):
    safe = chat(made, opened_by_hand)()
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


@pytest.mark.parametrize(
    ("reward_funcs", "action", "field"),
    [
        (lambda completions, **kwargs: 1.0, "Done.", "<lambda>"),
        (lambda completions, **kwargs: [1.0, 2.0], "Done.", "<lambda>"),
        (never, "Done.", "reward_funcs"),
        (opened, calls(("picture", {})), "picture"),  # what is no image is refused and not left out
    ],
)
def test_a_value_that_cannot_be_used_is_an_error(reward_funcs, action, field):
    dial = chat(Dial, reward_funcs)()
    dial.reset(code="1")
    with refused(field):
        dial.step(action)
    dial.close()


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


@pytest.mark.parametrize("code", ["1", "2"])
def test_success_is_what_the_environment_says(code):
    """A reward for the format alone is above 0, too."""
    environment = chat(type("Said", (Dial,), {"success": Dial.reward}), lambda completions, **_: [0.1])()
    environment.reset(code=code)
    environment.step(calls(("turn", {"digit": 1})))
    end = environment.step("done")
    assert end.reward == 0.1 and end.info["success"] is (code == "1")
    environment.close()


class Judged(Safe):
    """Asks a judge through a client that runs a loop of its own, and forgets what it was asked for."""

    price = 0.5

    def visit(self, rooms):
        return rooms.pop()

    def get_reward(self):
        return asyncio.run(asyncio.sleep(0, self.price))


def test_a_reward_may_run_a_loop_and_is_a_number():
    environment = ChatToolEnvironment(Judged, 3, tool_schemas="")
    environment.reset(prompt="go")
    called = environment.step(calls(("visit", {"rooms": ["hall", "cellar"]}))).observation.request
    assert called.messages[-2]["tool_calls"][0]["function"]["arguments"] == {"rooms": ["hall", "cellar"]}
    assert environment.step("done").reward == 0.5
    environment.inner.price = "1"
    with refused("get_reward of Judged"):
        environment.step("done")
