"""Credit for logged runs: each form and protocol by hand, and errors with line and remedy."""

import json
import re

import pytest
from logged_walks import BY_HAND, LINE, SYSTEM, TASK, as_blocks, as_calls, as_items, call, conversations, write
from refusals import refused
from run_g2po import outcome

from g2po_trl import g2po
from g2po_trl.logs.credit import credit_traces, rows
from g2po_trl.logs.traces import trajectories_of_traces
from g2po_trl.view.words import action_text

WALKS = conversations()
CHAT = WALKS[0]["messages"]  # system, task, call, result, call, result


def without(name, line, **more):
    return {key: value for key, value in line.items() if key != name} | more


def single_calls():
    """Both episodes by turns; the reward is on the last line of each."""
    for turn in (0, 1):
        for walk in WALKS:
            line = {"task_id": "mug", "episode_id": walk["id"], **as_calls(walk["messages"])[turn]}
            yield line | ({"reward": walk["reward"]} if turn else {})


def pairs_of_items():
    """A line for each call: bodies of request and response, which continue each other by `previous_response_id`."""
    for walk in WALKS:
        messages, after = walk["messages"][1:], {}
        for place in (0, 2):
            asked = {"instructions": SYSTEM["content"], "input": as_items(messages[place : place + 1]), **after}
            output = as_items(messages[place + 1 : place + 2])
            answer = {"object": "response", "id": f"r{place}", "status": "completed", "output": output}
            after = {"previous_response_id": answer["id"]}
            line = {"task_id": "mug", "episode_id": walk["id"], "request": {"model": "m", **asked}, "response": answer}
            yield line if place else {**line, "reward": walk["reward"]}


def whole(field, read, **more):
    """Each episode on a line, in other words."""
    return [without("messages", walk, **{field: read(walk["messages"])}, **more) for walk in WALKS]


ROBOT = SYSTEM["content"]
FORMS = {
    "conversations": (WALKS, {}),
    "calls of an episode": (whole("calls", as_calls), {}),
    "single calls": ([*single_calls()], {}),
    "items": (whole("items", lambda chat: as_items(chat[1:]), instructions=ROBOT), {"input.reasoning": 4}),
    "pairs of items": ([*pairs_of_items()], {"input.reasoning": 4}),
    "blocks": (whole("messages", lambda chat: as_blocks(chat[1:]), system=ROBOT), {"messages.thinking": 4}),
}


def unscaled(graph):
    return g2po(graph, scale_by_std=False)


@pytest.mark.parametrize(("lines", "skipped"), FORMS.values(), ids=FORMS)
def test_each_form_by_hand(lines, skipped):
    traces = trajectories_of_traces(map(json.dumps, lines))
    graph = credit_traces(traces, unscaled, gamma=0.5)
    assert [step.advantage for step in traces.steps] == BY_HAND
    names = ("episode", "call", "advantage", "value", "visits")
    found = [tuple(row[name] for name in names) for row in rows(traces, graph)]
    assert found[:2] == [("won", 1, 7.5, 1.0, 2), ("won", 2, 6.5, 4.0, 1)]
    assert found[2:] == [("lost", 1, -8.5, 1.0, 2), ("lost", 2, -5.5, 0.0, 1)]
    (group,) = traces.groups
    assert [(t.outcome, t.task_id) for t in group] == [("success", "mug"), ("failure", "mug")]
    first, second = group[0].steps
    assert first.observation == "system: You are a robot.\n\nuser: Find the mug."
    assert (second.observation, action_text(second)) == ("tool: kitchen", 'go({"to": "mug"})')
    assert [[m["role"] for m in step.messages] for step in group[0].steps] == [["system", "user"], ["tool"]]
    _, news, asked = json.loads(second.state_key)
    assert news == {"content": "kitchen", "role": "tool"} and asked.keys() == {"asked"}
    assert traces.skipped == skipped and not traces.without_calls and not traces.unread
    chat = [step.key for step in trajectories_of_traces(WALKS).steps]
    assert [step.key for step in traces.steps] == chat, "the states are those of chat completions"


def test_a_response_may_be_a_message_a_completion_or_a_text():
    responses = [
        {"content": "left", "reasoning_content": "because"},
        {"id": "x", "choices": [{"message": {"role": "assistant", "content": "left"}, "finish_reason": "length"}]},
        "left",
    ]
    calls = [{"messages": [TASK], "response": response} for response in responses]
    traces = trajectories_of_traces([{"task": {"n": 1}, "reward": 1, "calls": calls, "model": "m"}])
    (trajectory,) = traces.trajectories
    found = [(action_text(step), step.completion, step.completion_truncated) for step in trajectory.steps]
    assert found == [("left", "because\n\nleft", False), ("left", "left", True), ("left", "left", False)]
    assert (trajectory.task_id, trajectory.info) == ('{"n": 1}', {"episode": 1, "line": 1})
    assert traces.unread == {"model": 1}


def test_what_is_no_call_and_has_no_result_is_counted():
    greeting = {"role": "assistant", "content": "Hello!"}
    lines = [
        {"task_id": "a", "reward": None, "messages": [TASK, call("x")]},
        "",
        {"task_id": "a", "reward": -1, "success": True, "messages": [greeting, TASK, call("x"), call("y")]},
        {"task_id": "a", "reward": 0, "messages": [SYSTEM, TASK]},
        {"task_id": "b", "reward": 2, "messages": [TASK, call("x")]},
    ]
    traces = trajectories_of_traces(lines)
    assert [[t.outcome for t in group] for group in traces.groups] == [["error", "success"], ["success"]]
    assert traces.without_calls == 1
    told = rows(traces, credit_traces(traces, unscaled, gamma=0.5))
    assert [(row["value"], row["visits"]) for row in told] == [(None, None), (-0.25, 1), (-0.5, 1), (1.0, 1)]
    assert {step.advantage for step in traces.steps} == {None}


CALL = {"task_id": "t", "episode_id": "e", "messages": [TASK], "response": "ok"}


@pytest.mark.parametrize(
    ("lines", "line", "field"),
    [
        *(([text], 1, "line") for text in ("{", "[1]", "[" * 100_000)),
        ([LINE, {"task_id": "t", "reward": 1}], 2, "messages"),
        ([{**LINE, "calls": []}], 1, "calls"),
        ([{**LINE, "episode_id": "e"}], 1, "response"),
        ([{"reward": 1, "messages": [TASK]}], 1, "task_id"),
        ([{"task_id": "t", "messages": [TASK]}], 1, "reward"),
        *(([{**LINE, "reward": value}], 1, "reward") for value in ("1", float("nan"), 10**400)),
        ([{**LINE, "messages": [TASK, {"role": 3}]}], 1, "messages"),
        ([{**LINE, "id": "e"}, LINE, {**LINE, "id": "e"}], 3, "id"),
        ([{"task": "t", "reward": 1, "calls": [3]}], 1, "calls"),
        ([{**CALL, "reward": 0}, {**CALL, "reward": 1}], 2, "reward"),
        *(([{**CALL, "response": value}], 1, "response") for value in (TASK, {"choices": []})),
    ],
)
def test_errors_name_line_and_field(lines, line, field):
    with refused(field) as error:
        trajectories_of_traces(lines)
    assert str(error.value).startswith(f"line {line}: ")


def test_a_state_key_takes_the_messages_of_the_request_and_its_errors_name_the_line():
    traces = trajectories_of_traces(WALKS, lambda messages: f"{len(messages)} {messages[-1]['content'][:1]}")
    assert [step.key for step in traces.trajectories[1].steps] == ["2 F", "4 c"]
    for key in (lambda messages: None, lambda messages: messages[0]["page"]):
        with refused("state_key") as error:
            trajectories_of_traces([LINE], key)
        assert str(error.value).startswith("line 1: ")


def test_unknown_kinds_are_skipped_and_counted():
    """In each protocol. What is left of a message stays."""
    picture = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "…"}}]
    chat = [{"role": "user", "content": picture}, {"role": "critic", "content": "?"}, call("x"), call("y")]
    blocks = [{"type": "text", "text": "Look:"}, {"type": "document"}, {"type": "tool_result", "content": picture}]
    image = [{"type": "input_text", "text": "Look:"}, {"type": "input_image"}]
    items = [{"role": "user", "content": image}, {"type": "mcp_call"}, {"role": "assistant", "content": "yes"}]
    given = {"messages": chat}, {"messages": [{"role": "user", "content": blocks}, call("x")]}, {"items": items}
    traces = trajectories_of_traces([{"task_id": "t", "reward": 1, **one} for one in given])
    chat_kinds = {"messages.image_url": 2, "messages of role critic": 1, "messages.document": 1}
    assert traces.skipped == chat_kinds | {"input.input_image": 1, "input.mcp_call": 1}
    first = [re.sub(r"\n\[image \w{16}\]", "", t.steps[0].observation) for t in traces.trajectories]
    assert first == ["user: Look:", "user: Look:\n\ntool: Look:", "user: Look:"]


def test_what_a_log_contains_does_not_reach_the_terminal(tmp_path, capsys):
    asked = {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "\x1b]0;a\x07"}]}
    file = write(tmp_path / "runs.jsonl", [{**LINE, "messages": [asked, call("x")], "\ud800\x1b": 1}])
    said = outcome(capsys, "credit", file)[1]
    assert "skipped: messages.\N{REPLACEMENT CHARACTER}]0;a" in said and "\x1b" not in said


def test_the_published_log_of_tau_bench_is_read_as_it_is():
    traces = trajectories_of_traces([{"task_id": 0, "reward": 1.0, "info": {}, "traj": CHAT[:4], "trial": 0}])
    assert len(traces.trajectories[0].steps) == 1 and traces.unread == {"info": 1, "trial": 1}
