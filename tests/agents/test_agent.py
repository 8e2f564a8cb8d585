"""Agents as environments: what they ask is observed, what they return is the reward, and each end has a name."""

import asyncio
import contextlib
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from refusals import refused
from scripted_agents import ADD, ask, ask_plainly, calls, play, says, tool_loop, wait_until

from g2po_trl import AgentEnvironment, EnvironmentPool, PoolLimits
from g2po_trl.agents import agent as agent_module
from g2po_trl.environments.causes import BrokenEnvironmentError
from g2po_trl.environments.validation import EnvironmentContractError, validate_step
from g2po_trl.prompts.conversation import ChatResponse


def test_a_loop_on_the_openai_client():
    both = calls(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}))
    script = [both, calls(("add", {"a": 3, "b": 7})), says("10")]
    seen, end = play(tool_loop, script, question="1+2+3+4?", answer="10")
    assert [one.text for one in seen] == ["system: Use the tools.\n\nuser: 1+2+3+4?", "tool: 3\n\ntool: 7", "tool: 10"]
    assert seen[0].task == "1+2+3+4?" and seen[1].task is None
    assert '{"content": "3", "role": "tool"}, {"content": "7", "role": "tool"}, {"asked":' in seen[1].state_key
    first, second, third = (one.request for one in seen)
    assert [tool["function"]["name"] for tool in first.tools] == ["add"] and first.stop == ()
    made = [(call["id"], call["function"]["arguments"]) for call in second.messages[2]["tool_calls"]]
    assert made == [("call_1", {"a": 1, "b": 2}), ("call_2", {"a": 3, "b": 4})]
    answered = [message["tool_call_id"] for message in third.messages if message["role"] == "tool"]
    assert answered == ["call_1", "call_2", "call_3"]
    assert (end.reward, end.terminated, end.truncated) == (1.0, True, False)
    assert end.info == {"success": True, "ignored_fields": ["temperature"]}


async def asking(client, text, **options):
    model = client.async_openai(max_retries=0, **options).chat.completions
    made = await model.create(model=client.model, messages=[{"role": "user", "content": text}])
    return made.choices[0].message.content


async def async_loop(task, client):
    """Two questions at the same time, then one with both answers."""
    shared = {"http_client": task["shared"]}
    answers = await asyncio.gather(*(asking(client, text, **shared) for text in task["parts"]))
    return len(await asking(client, " and ".join(answers), **shared))


def test_parallel_requests_are_steps_one_after_the_other():
    """By an async client that episodes share, as langchain-openai's: each has an event loop of its own."""
    import openai

    answers = {"user: x": "1", "user: y": "20", "user: z": "300", "user: 1 and 20 and 300": "done"}
    shared = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    for _ in range(2):
        environment, said = AgentEnvironment(async_loop, 10), []
        seen = environment.reset(parts=["x", "y", "z"], shared=shared)
        for _ in answers:
            said.append(seen.text)
            result = environment.step(says(answers[seen.text]))
            seen = result.observation
        assert result.terminated and result.reward == 4.0 and sorted(said[:3]) + said[3:] == list(answers)


def streaming(task, client):
    """The reward is the number of tokens, the info what the deltas were."""
    seen, options = {"text": "", "arguments": ["", ""], "names": [], "ends": []}, {"include_usage": True}
    given = {"model": client.model, "messages": [{"role": "user", "content": "go"}], "tools": [ADD]}
    for chunk in client.openai().chat.completions.create(stream=True, stream_options=options, **given):
        for choice in chunk.choices:
            seen["text"] += choice.delta.content or ""
            seen["ends"] += [choice.finish_reason] * (choice.finish_reason is not None)
            for call in choice.delta.tool_calls or ():
                seen["names"] += [(call.id, call.function.name)] * bool(call.id)
                seen["arguments"][call.index] += call.function.arguments
    return chunk.usage.total_tokens, True, seen


def test_a_stream_has_text_tool_calls_and_usage():
    made = tuple({"function": {"name": "add", "arguments": given}} for given in ({"a": 1}, "{not json"))
    response = ChatResponse("hm ü", made, "tool_calls", prompt_tokens=5, completion_tokens=6)
    _, end = play(streaming, [response.to_action()])
    names, arguments = [("call_1", "add"), ("call_2", "add")], ['{"a": 1}', "{not json"]
    streamed = {"text": "hm ü", "arguments": arguments, "names": names, "ends": ["tool_calls"]}
    assert (end.reward, end.info) == (11.0, {"success": True, **streamed})


def by_smolagents(task, client):
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number.
            b: the other one.
        """
        return a + b

    model = smolagents.OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    return smolagents.ToolCallingAgent([add], model, verbosity_level=0, max_steps=4).run(task["question"]) == "3"


def test_a_tool_calling_agent_of_smolagents():
    script = [calls(("add", {"a": 1, "b": 2}), content="I add."), calls(("final_answer", {"answer": "3"}))]
    seen, end = play(by_smolagents, script, question="1+2?")
    assert end.reward == 1.0 and end.info == {"ignored_fields": ["tool_choice"]}
    first, second = (one.request for one in seen)
    assert {tool["function"]["name"] for tool in first.tools} == {"add", "final_answer"}
    assert first.stop == ("Observation:", "Calling tools:") and first.messages == second.messages[:2]
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    assert "Observation:\n3" in seen[1].text and seen[1].text.startswith("user: ")


def result_of(value):
    return validate_step(play(lambda task, client: ask_plainly(client, "x") and value, [says("y")])[1], "step")


@pytest.mark.parametrize(
    ("value", "reward", "info"),
    [
        *((value, 1.0, {}) for value in (1, True, np.bool_(True), np.float32(1), {"reward": 1, "info": None})),
        ((0.5, False), 0.5, {"success": False}),
        ([1, np.bool_(True), {"score": 3}], 1.0, {"score": 3, "success": True}),
    ],
)
def test_what_an_agent_may_return(value, reward, info):
    end = result_of(value)
    assert (end.reward, end.info) == (reward, info)


@pytest.mark.parametrize(
    "value", [None, "won", (1,), (1, 2, {}), (1, True, "good"), {"reward": 1, "sucess": True}, {"success": True}]
)
def test_what_an_agent_may_not_return(value):
    with pytest.raises(EnvironmentContractError):
        result_of(value)


def test_a_request_of_any_length_is_observed():
    text = "x" * 1_100_000
    (seen, *_), _ = play(lambda task, client: float(ask_plainly(client, text)), [says("0.5")])
    assert seen.request.messages[0]["content"] == text and len(seen.text) == 1_000_000


def raising(error, cause=None, asks=True):
    def agent(task, client):
        if asks:
            ask(client, "x")
        raise error from cause

    return agent


def refused_alone(task, client):
    with contextlib.suppress(Exception):
        ask(client, "x", n=2)


CLOSED = ConnectionResetError("the shop is closed")


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        (raising(KeyError("a bug"), asks=False), KeyError),
        (raising(SystemExit(3), asks=False), RuntimeError),
        (lambda task, client: 1.0, EnvironmentContractError),
        (refused_alone, EnvironmentContractError),
        (raising(RuntimeError("tool failed"), CLOSED), RuntimeError),
        (raising(ExceptionGroup("tasks", [ValueError(), CLOSED])), ExceptionGroup),
        (raising(BrokenEnvironmentError("in pieces")), BrokenEnvironmentError),
    ],
)
def test_what_is_no_failure_of_the_model_is_raised(agent, kind):
    """What happens before the first request, and what environments raise."""
    with pytest.raises(kind):
        play(agent, [says("y")])


@pytest.mark.parametrize(
    ("error", "said"), [(TypeError("no\nway"), ": no"), (SystemExit(2), ": 2"), (asyncio.CancelledError(), "")]
)
def test_an_agent_that_raises(error, said):
    _, end = play(raising(error), [says("y")])
    assert (end.reward, end.terminated, end.info["success"]) == (0, True, False)
    assert end.info["failure_reason"] == f"agent error: {type(error).__name__}{said}"
    assert "in agent\n    raise error" in end.info["traceback"]


def impatient(task, client):
    """Ask with a time limit of its own, and end as the task says."""
    ask(client, "x")
    model = client.openai(timeout=0.3, max_retries=task.get("retries", 0)).chat.completions
    try:
        answer = model.create(model=client.model, messages=[{"role": "user", "content": "y"}])
        return float(answer.choices[0].message.content == "late")
    except Exception:
        if task["then"] == "raises":
            raise
        return 0.0


def left(**task):
    """Return the last result of an impatient agent, whose second answer comes after it has gone."""
    environment = AgentEnvironment(impatient, 5)
    try:
        environment.reset(**task)
        environment.step(says("now"))
        wait_until(lambda: any(not call.clients for call in environment._session._calls[1:]))
        return environment.step(says("late"))
    finally:
        environment.close()


def test_a_request_that_is_given_up_is_counted_and_one_that_is_repeated_is_one_step():
    with pytest.raises(EnvironmentContractError):
        left(then="raises")
    end = left(then="returns")
    assert (end.reward, end.info) == (0.0, {"unanswered_requests": 1})
    end = left(then="raises", retries=9)
    assert (end.reward, end.info) == (1.0, {})


def careful(task, client):
    from openai import NotFoundError

    for turn in range(9):
        try:
            ask(client, f"{turn}")
        except NotFoundError as error:
            return turn, error.code == "turn_limit"


def test_the_turn_limit():
    _, end = play(stubborn, [says("")] * 3, max_turns=3, name="a")
    assert (end.truncated, end.terminated, end.reward, end.info["out_of_turns"]) == (True, False, 0, True)
    _, end = play(careful, [says("")] * 3, max_turns=3)
    assert (end.terminated, end.reward, end.info) == (True, 3.0, {"success": True, "out_of_turns": True})
    _, end = play(lambda task, client: len(ask(client, "x").content), [says("abc")], max_turns=1)
    assert (end.terminated, end.reward, end.info) == (True, 3.0, {})


def test_the_agent_of_an_episode_that_was_given_up_cannot_reach_the_next():
    errors = []

    def agent(task, client):
        for _ in range(3):
            try:
                return float(ask(client, task["name"]).content)
            except Exception as error:
                errors.append((task["name"], error.status_code, error.code))

    environment = AgentEnvironment(agent, 5)
    environment.reset(name="first")
    assert environment.reset(name="second").text == "user: second"
    assert environment.step(says("7")).reward == 7
    assert errors == [("first", 404, "episode_ended"), *[("first", 401, "invalid_api_key")] * 2]


def test_state_keys_of_ones_own():
    environment = AgentEnvironment(lambda task, client: ask(client, "a", "b"), 5, state_key=len)
    assert environment.reset().state_key == "2"
    environment.state_key = lambda messages: {"b", "a", "c", "d", "e"}  # in another order in each process
    assert environment.reset().state_key == '["a", "b", "c", "d", "e"]'
    environment.state_key = lambda messages: None
    with refused("state_key"):
        environment.reset()
    environment.close()


def stubborn(task, client):
    """Asks until the model says the end; dies where it says so."""
    for turn in range(1000):
        said = ask_plainly(client, f"{task['name']} {turn}")
        if said == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if said == "end":
            return turn


def agent_pool(agent):
    return EnvironmentPool(partial(AgentEnvironment, agent, 20), PoolLimits(1))


def test_in_the_pool_an_agent_ends_with_its_episode_and_not_at_the_next_one(tmp_path):
    """The trainer ends an episode whose prompt is too long; after the rollout, the pool is idle for minutes."""

    def agent(task, client):
        client.at_end((tmp_path / task["name"]).touch)
        return float(ask(client, "x").content)

    with agent_pool(agent) as pool:
        pool.reset([{"name": name} for name in "abc"])
        pool.end([0, 2])
        wait_until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"])
        assert pool.step({1: says("1")})[1].reward == 1 and (tmp_path / "b").exists()


def test_in_the_pool_a_killed_worker_costs_no_episode():
    with agent_pool(stubborn) as pool:
        pool.reset([{"name": name} for name in "ab"])
        for turn in range(1, 4):
            os.kill(pool.worker_pids[0], signal.SIGKILL)
            results = pool.step(dict.fromkeys(range(2), says("go")))
            assert [results[slot].observation.text for slot in range(2)] == [f"user: a {turn}", f"user: b {turn}"]
        assert pool.replayed == 6
        assert pool.step({0: says("kill")})[0].kind == "crash"
        assert pool.step({1: says("end")})[1].reward == 3.0


def deaf(task, client):
    """Ignores all that would end it."""
    with contextlib.suppress(Exception):
        while ask_plainly(client, task["name"]) == "go":
            pass
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def make_deaf():
    agent_module.STRAY_SECONDS = 0.0
    return AgentEnvironment(deaf, 5)


def test_an_agent_that_ignores_everything_has_its_worker_replaced_and_costs_no_episode(capfd):
    with EnvironmentPool(make_deaf, PoolLimits(1)) as pool:
        pool.reset([{"name": "polite"}, {"name": "deaf"}])
        before = pool.worker_pids
        pool.end([1])  # the trainer has given the episode up
        for _ in range(3):
            assert pool.step({0: says("go")})[0].observation.text == "user: polite"
        assert pool.worker_pids != before and pool.replayed == 1
