"""Environments in TRL's style: calls by hand, and one class that trains under both trainers."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset
from letter_trainer import make_config
from refusals import refused
from returning import check_played_again
from scripted_agents import calls
from tools_by_hand import Counter, Safe, Telephone

from g2po_trl import (
    EnvironmentPool,
    G2POTrainer,
    Observation,
    PoolLimits,
    PromptTemplate,
    StepResult,
    TextEnvironment,
    ToolEnvironment,
    check_environment,
)
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure
from g2po_trl.environments.setup import played_as
from g2po_trl.environments.tools.trl_tools import is_tool_environment
from g2po_trl.environments.validation import constructed, validate_step
from g2po_trl.prompts.template import DEFAULT_PROMPT, ParsedCompletion
from g2po_trl.prompts.tool_calls import TOOL_PROMPT, parse_tool_calls, read_calls


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_default_prompt_template_is_the_class_attribute():
    mine = PromptTemplate(first="{observation}!", later="{history} {observation}!")

    class WithPrompt(TextEnvironment):
        prompt_template = mine

    for made, template in (
        *((made, DEFAULT_PROMPT) for made in (TextEnvironment, lambda: WithPrompt())),
        *((made, mine) for made in (WithPrompt, partial(WithPrompt))),
        *((made, TOOL_PROMPT) for made in (Safe, partial(ToolEnvironment, Safe, 5))),
    ):
        assert played_as(made, EpisodeLimits())[1] is template
    assert not is_tool_environment(lambda: Safe())


def test_completions_are_read():
    assert parse_tool_calls(f"I think. {call('turn', digit=1)} Well.") == (call("turn", digit=1), True)
    both = call("turn", digit=1) + call("listen")
    assert parse_tool_calls(both.replace("</tool_call><", "</tool_call>\n<")) == (both, True)
    assert parse_tool_calls("  done ") == ("done", True) and parse_tool_calls("") == ("", False)
    for broken in ("turn 1</tool_call>", "{}</tool_call>", "{", "[1]</tool_call>"):
        assert not parse_tool_calls(f"<tool_call>{broken}").valid
    assert read_calls(both) == [("turn", {"digit": 1}), ("listen", {})]
    quoted = f"<think>I could {call('turn', digit=1)}</think>"
    assert parse_tool_calls(f"{quoted} Done.") == ("Done.", True)
    assert parse_tool_calls(quoted + call("listen")) == (call("listen"), True)


def test_an_episode_by_hand():
    safe = ToolEnvironment(Safe, max_turns=10)
    prompt = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Open it."}]
    first = safe.reset(code="12", prompt=prompt)
    assert first.text == "The safe is locked."
    assert first.task.endswith("Be quick.\n\nOpen it.")
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


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (["hall", "kitchen"], "['hall', 'kitchen']"),
        (("hall", 2), "('hall', 2)"),
        ([{"name": "hall", "type": "room"}], "[{'name': 'hall', 'type': 'room'}]"),
        ([], "[]"),
        (b"hall", "b'hall'"),
        ([{"type": "text", "text": "A map:"}, {"type": "text", "text": "a hall"}], "A map:\na hall"),
    ],
)
def test_what_a_tool_returns_is_shown_whatever_it_is(returned, shown):
    class Rooms(Safe):
        def rooms(self):
            return returned

    rooms = ToolEnvironment(Rooms, 9, tool_schemas="")
    rooms.reset()
    assert rooms.step(call("rooms")).observation.text == shown
    rooms.close()


@pytest.mark.parametrize("history", ["window", "conversation"])
def test_code_of_the_model_that_exits_is_answered(history):
    class Python(Safe):
        def run(self, code: str) -> str:
            """Run code.

            Args:
                code: the code.
            """
            exec(code)

    python = played_as(Python, EpisodeLimits(9), None, history)[0]()
    python.reset()
    action = call("run", code="exit(3)") if history == "window" else calls(("run", {"code": "exit(3)"}))
    assert "error" in validate_step(python.step(action), "step").observation.text
    python.close()


def test_a_connection_opened_in_reset_lives_in_tools():
    telephone = ToolEnvironment(Telephone, 9)
    assert telephone.reset().text == "It rings."
    for word in ("hello", "again"):
        assert telephone.step(call("say", word=word)).observation.text == word.upper()
    telephone.close()
    assert telephone.inner.hung_up


def test_the_environments_own_failure_is_an_error_and_no_answer_to_the_model():
    with EnvironmentPool(played_as(Telephone, EpisodeLimits(9), history="window")[0], PoolLimits(1)) as pool:
        for calls, message in (
            ([call("hang_up"), call("say", word="x")], "the line is dead"),
            ([call("smash")], "in pieces"),
        ):
            pool.reset([{}])
            results = [pool.step({0: action})[0] for action in calls]
            assert isinstance(results[-1], EnvironmentFailure) and message in results[-1].message
            assert all(isinstance(result, StepResult) for result in results[:-1])


def test_workers_need_no_torch_to_describe_tools():
    factory = played_as(Safe, EpisodeLimits(5), history="window")[0]
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        (first,) = pool.reset([{"code": "12"}])
        assert isinstance(first, Observation) and first.task == ToolEnvironment(Safe, 5).reset(code="12").task
        assert "torch" not in Path(f"/proc/{pool.worker_pids[0]}/maps").read_text()
    assert played_as(TextEnvironment, EpisodeLimits(5), history="window")[0] is TextEnvironment


def test_the_last_turn_is_paid():
    safe = ToolEnvironment(Safe, max_turns=2)
    safe.reset(code="12")
    assert not safe.step(call("turn", digit=1)).terminated
    last = safe.step(call("turn", digit=2))
    assert (last.reward, last.terminated, last.info) == (10.0, True, {"success": True, "out_of_turns": True})


class NoReward:
    def look(self):
        pass


class NoTool:
    def get_reward(self):
        return 0.0


class Mumbling(Safe):
    def kick(self, where):
        pass


class Broken(TextEnvironment):
    prompt_template = "{observation}"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: ToolEnvironment(NoReward, 3), "get_reward of NoReward"),
        (lambda: ToolEnvironment(NoTool, 3), "the tools of NoTool"),
        (lambda: played_as(Mumbling, EpisodeLimits(5), history="window")[0], "kick"),
        (lambda: played_as(Broken, EpisodeLimits()), "prompt_template"),
        (lambda: constructed(lambda: Safe(), "it"), "step"),
    ],
)
def test_what_is_missing_is_refused_by_its_field(call, field):
    with refused(field):
        call()


def test_it_keeps_the_contract():
    check_environment(lambda: ToolEnvironment(Safe, 5), {"code": "3"}, actions=[call("turn", digit=3), "done"])


def a_digit(completion, prompt_end=""):
    """What a random model can say: some letter, read as a turn of the dial to 1 or 2."""
    digit = 1 if completion[:1].lower() <= "m" else 2
    return ParsedCompletion(call("turn", digit=digit), True)


@pytest.mark.parametrize("max_turns", [9, 4])
def test_several_calls_and_chance_are_played_again(max_turns):
    """Also those that the last turn ends; and failed calls change nothing."""
    two = call("ticket", who="a") + call("ticket", who="b")
    actions = [two, call("ticket", where="c"), two, call("ticket", who="d"), "That is all."]
    factory = played_as(Counter, EpisodeLimits(max_turns), history="window")[0]
    episode = check_played_again(factory, {"seed": 3}, actions, max_turns)
    assert episode.steps[1].observation.startswith("ticket 1 of a: window ")
    assert "\nticket 2 of b: window " in episode.steps[1].observation
    assert episode.reward == 5.0 and len(episode.steps) == min(5, max_turns)


class LuckySafe(Safe):
    """As TRL's examples: a reward function reads its state, and `reset` draws."""

    prompt_template = PromptTemplate(first="{observation}", later="{history} {observation}", parse_completion=a_digit)
    get_reward = None

    def reset(self, **row):
        return f"{super().reset(**row)} It has number {random.random()}."


def test_it_trains_with_reward_functions_and_draws_are_noticed(tmp_path, tiny_model_dir, caplog, capsys):
    def opened(environments, code, **kwargs):
        return [float(safe.turned == one) for safe, one in zip(environments, code)]

    def turns(environments, **kwargs):
        return [len(safe.turned) for safe in environments]

    trainer = G2POTrainer(
        str(tiny_model_dir),
        make_config(tmp_path / "out", max_steps=1, max_turns=2, max_prompt_length=None, reward_weights=[10.0, -1.0]),
        Dataset.from_list([{"code": code, "prompt": "Open the safe."} for code in ("11", "12", "21", "22")]),
        environment_factory=LuckySafe,
        reward_funcs=[opened, turns],
    )
    trainer.train()
    trainer.close()
    played = [json.loads(line) for line in (tmp_path / "out" / "trajectories" / "train-000001.jsonl").open()]
    scores = [(t["info"]["score_opened"], t["info"]["score_turns"]) for t in played]
    assert [t["reward"] for t in played] == [10 * opened - turned for opened, turned in scores]
    assert {turned for _, turned in scores} == {2.0}
    assert sum("different states" in record.getMessage() for record in caplog.records) == 1
