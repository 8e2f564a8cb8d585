"""Credit for logged runs: each form and protocol by hand, and errors with line and remedy."""

import base64
import json
import re

import numpy as np
import pytest
from logged_walks import (
    BY_HAND,
    LINE,
    PATHS,
    SYSTEM,
    TASK,
    as_blocks,
    as_calls,
    as_items,
    call,
    conversation,
    conversations,
    seen,
    write,
)
from refusals import refused
from run_g2po import outcome

from g2po_trl import g2po
from g2po_trl.credit.state_keys import merge_similar_keys
from g2po_trl.logs.credit import credit_traces, rows, states
from g2po_trl.logs.traces import trajectories_of_file, trajectories_of_traces
from g2po_trl.utils.images import as_picture
from g2po_trl.view.words import action_text


def episodes_of_calls():
    return [
        {"task": "mug", "id": line["id"], "reward": line["reward"], "calls": as_calls(line["messages"])}
        for line in conversations()
    ]


def single_calls():
    """Both episodes by turns; the reward is on the last line of each."""
    lines = [
        {"task_id": "mug", "episode_id": line["id"], **one}
        for pair in zip(*(as_calls(line["messages"]) for line in conversations()))
        for one, line in zip(pair, conversations())
    ]
    return [*lines[:2], {**lines[2], "reward": 8}, {**lines[3], "reward": 0.0}]


def items():
    """Both episodes as OpenAI's Responses, whole."""
    for name, (reward, places) in PATHS.items():
        walk = as_items(conversation(*places)[1:])
        yield {"task_id": "mug", "id": name, "reward": reward, "instructions": SYSTEM["content"], "items": walk}


def pairs_of_items():
    """A line for each call: bodies of request and response, which continue each other by `previous_response_id`."""
    for name, (reward, places) in PATHS.items():
        walk, after = conversation(*places)[1:], {}
        for number, place in enumerate((0, 2)):
            new = as_items(walk[:1] if number == 0 else walk[place : place + 1])
            request = {"model": "m", "instructions": SYSTEM["content"], "input": new, **after}
            answer = {"object": "response", "id": f"r{number}", "status": "completed"}
            answer["output"] = as_items(walk[place + 1 : place + 2])
            after = {"previous_response_id": answer["id"]}
            line = {"task_id": "mug", "episode_id": name, "request": request, "response": answer}
            yield line if number else {**line, "reward": reward}


def blocks():
    """Both episodes as Anthropic's Messages, whole."""
    for name, (reward, places) in PATHS.items():
        walk = as_blocks(conversation(*places)[1:])
        yield {"task_id": "mug", "id": name, "reward": reward, "system": SYSTEM["content"], "messages": walk}


def pairs_of_blocks():
    """Both episodes as calls: the bodies of request and response."""
    for line in blocks():
        walk, calls = line.pop("messages"), []
        for place in (1, 3):
            request = {"max_tokens": 9, "system": line["system"], "messages": walk[:place]}
            answer = {"type": "message", "id": "m", "stop_reason": "tool_use", **walk[place]}
            calls.append({"request": request, "response": answer})
        line.pop("system")
        yield {**line, "calls": calls}


FORMS = {
    "1": (conversations, {}),
    "2": (episodes_of_calls, {}),
    "3": (single_calls, {}),
    "items": (items, {"input.reasoning": 4}),
    "pairs of items": (pairs_of_items, {"input.reasoning": 4}),
    "blocks": (blocks, {"messages.thinking": 4}),
    "pairs of blocks": (pairs_of_blocks, {"messages.thinking": 6}),
}


def unscaled(graph):
    return g2po(graph, scale_by_std=False)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_by_hand(form):
    lines, skipped = FORMS[form]
    traces = trajectories_of_traces(map(json.dumps, lines()))
    graph = credit_traces(traces, unscaled, gamma=0.5)
    assert [step.advantage for step in traces.steps] == BY_HAND
    told = [
        (row["episode"], row["call"], row["advantage"], row["value"], row["visits"]) for row in rows(traces, graph)
    ]
    assert told == [
        ("won", 1, 7.5, 1.0, 2),
        ("won", 2, 6.5, 4.0, 1),
        ("lost", 1, -8.5, 1.0, 2),
        ("lost", 2, -5.5, 0.0, 1),
    ]
    (group,) = traces.groups
    assert [t.outcome for t in group] == ["success", "failure"] and {t.task_id for t in group} == {"mug"}
    first, second = group[0].steps
    assert first.observation == "system: You are a robot.\n\nuser: Find the mug."
    assert (second.observation, action_text(second)) == ("tool: kitchen", 'go({"to": "mug"})')
    assert [[m["role"] for m in step.messages] for step in group[0].steps] == [["system", "user"], ["tool"]]
    _, news, asked = json.loads(second.state_key)
    assert news == {"content": "kitchen", "role": "tool"} and asked.keys() == {"asked"}
    assert traces.skipped == skipped and not traces.without_calls
    assert not traces.unread
    chat = [step.key for t in trajectories_of_traces(conversations()).trajectories for step in t.steps]
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
    assert [action_text(step) for step in trajectory.steps] == ["left"] * 3
    assert [step.completion for step in trajectory.steps] == ["because\n\nleft", "left", "left"]
    assert [step.completion_truncated for step in trajectory.steps] == [False, True, False]
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
    second = traces.groups[0][1].steps[1]
    assert [message["content"] for message in json.loads(second.key)] == ["Hello!", "Find the mug.", ""]
    graph = credit_traces(traces, unscaled, gamma=0.5)
    assert {step.advantage for step in traces.steps} == {None}
    assert [(row["value"], row["visits"]) for row in rows(traces, graph)] == [
        (None, None),
        (-0.25, 1),
        (-0.5, 1),
        (1.0, 1),
    ]
    assert states(traces).startswith("No task has two episodes with a result")


def test_a_state_key_takes_the_messages_of_the_request():
    def place(messages):
        return f"{len(messages)} {messages[-1]['content'][:1]}"

    traces = trajectories_of_traces(conversations(), place)
    assert [step.key for step in traces.trajectories[1].steps] == ["2 F", "4 c"]


def test_who_is_asked_is_part_of_the_state():
    """The same question to another agent, by its system message or its tools, is another state."""
    tools = [[{"type": "function", "function": {"name": name}}] for name in ("look", "go")]
    asked = [({"role": "system", "content": name}, given) for name in "ab" for given in (*tools, tools[0] + tools[1])]
    lines = [
        {"task_id": "t", "reward": 1, "messages": [system, TASK, call("x"), seen("x"), call("y")], "tools": given}
        for system, given in asked
    ]
    calls = [{**line, "calls": [{"messages": line["messages"][:4], "response": "go"}]} for line in lines]
    for one in calls:
        del one["messages"]
    traces = trajectories_of_traces([*lines, *calls])
    assert not traces.unread
    keys = [trajectory.steps[-1].key for trajectory in traces.trajectories]
    assert len(set(keys)) == 6 and keys[:6] == keys[6:], "as live agents are keyed, in each form"
    merge_similar_keys(traces.trajectories, [0] * 12, 0.5)
    assert len({trajectory.steps[-1].key for trajectory in traces.trajectories}) == 6


def test_an_id_is_never_the_number_of_a_line():
    traces = trajectories_of_traces([{**LINE, "id": 2}, LINE, {**CALL, "episode_id": 2, "reward": 1}])
    assert [(t.info["episode"], len(t.steps)) for t in traces.trajectories] == [("2", 2), (2, 1)]


CALL = {"task_id": "t", "episode_id": "e", "messages": [TASK], "response": "ok"}


@pytest.mark.parametrize(
    ("lines", "line", "field"),
    [
        *(([text], 1, "line") for text in ("{", "[1]", "[]", "[" * 100_000, "[{}, null]")),
        ([LINE, {"task_id": "t", "reward": 1}], 2, "messages"),
        ([{**LINE, "calls": []}], 1, "calls"),
        ([{**LINE, "response": "ok"}], 1, "episode_id"),
        ([{**LINE, "episode_id": "e"}], 1, "response"),
        ([{"reward": 1, "messages": [TASK]}], 1, "task_id"),
        ([{**LINE, "task_id": 0.5}], 1, "task_id"),
        ([{"task_id": "t", "messages": [TASK]}], 1, "reward"),
        *(([{**LINE, "reward": value}], 1, "reward") for value in ("1", float("nan"), 10**400)),
        ([{**LINE, "success": 1}], 1, "success"),
        ([{**LINE, "messages": []}], 1, "messages"),
        ([{**LINE, "messages": [TASK, {"role": 3}]}], 1, "messages"),
        ([{**LINE, "id": "e"}, LINE, {**LINE, "id": "e"}], 3, "id"),
        *(([{"task": "t", "reward": 1, "calls": value}], 1, "calls") for value in (3, [3])),
        ([{"task": "t", "reward": 1, "calls": [{"messages": [TASK]}]}], 1, "response"),
        ([{"task": "t", "reward": 1, "calls": [{"messages": [3], "response": "ok"}]}], 1, "messages"),
        ([CALL], 1, "reward"),
        ([{**CALL, "reward": 0}, {**CALL, "reward": 1}], 2, "reward"),
        *(([{**CALL, "response": value}], 1, "response") for value in (TASK, {"choices": []})),
        ([{**CALL, "episode_id": None}], 1, "episode_id"),
    ],
)
def test_errors_name_line_and_field(lines, line, field):
    with refused(field) as error:
        trajectories_of_traces(lines)
    assert str(error.value).startswith(f"line {line}: ")


def test_unknown_kinds_are_skipped_and_counted(tmp_path, capsys):
    """In each protocol. What is left of a message stays."""
    picture = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "…"}}]
    chat = [{"role": "user", "content": picture}, {"role": "critic", "content": "?"}, call("x"), call("y")]
    blocks = [{"type": "text", "text": "Look:"}, {"type": "document"}, {"type": "tool_result", "content": picture}]
    image = [{"type": "input_text", "text": "Look:"}, {"type": "input_image"}]
    items = [{"role": "user", "content": image}, {"type": "mcp_call"}, {"type": "item_reference", "id": "m"}]
    items += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    lines = [
        {"task_id": "t", "reward": 1, "messages": chat},
        {"task_id": "t", "reward": 1, "messages": [{"role": "user", "content": blocks}, call("x")]},
        {"task_id": "t", "reward": 1, "items": items},
    ]
    traces = trajectories_of_traces(lines)
    assert traces.skipped == {
        "messages.image_url": 2, "messages of role critic": 1, "messages.document": 1,
        "input.input_image": 1, "input.mcp_call": 1, "input.item_reference": 1,
    }  # fmt: skip
    first = [trajectory.steps[0].observation for trajectory in traces.trajectories]
    assert [re.sub(r"\n\[image \w{16}\]", "", one) for one in first] == [
        "user: Look:",
        "user: Look:\n\ntool: Look:",
        "user: Look:\n\nuser: ?",
    ]
    said = outcome(capsys, "credit", write(tmp_path / "runs.jsonl", lines))[1]
    assert "  skipped: messages.image_url (2), " in said and said.count("image_url") == 1


def test_images_that_a_log_does_not_contain_tell_states_apart():
    """They are skipped and counted; what shows different ones alone is not one state."""
    keys = []
    for name in "aab":
        url, file = f"https://a.b/{name}.png", {"type": "file", "file_id": name}
        shown = [{"type": "image_url", "image_url": {"url": url}}], [{"type": "image", "source": file}]
        content, blocks = ({"messages": [{"role": "user", "content": one}]} for one in shown)
        asked = content, blocks, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": name}]}]}
        lines = [{"task_id": "t", "episode_id": "e", "reward": 1, **one, "response": "yes"} for one in asked]
        traces = trajectories_of_traces(lines)
        assert sum(traces.skipped.values()) == 3
        keys.append([step.key for step in traces.trajectories[0].steps])
    assert keys[0] == keys[1] and not set(keys[0]) & set(keys[2])


def test_images_in_each_protocol(tmp_path):
    """Equal texts beside other images are other states, and the viewer finds the images."""
    shades = [as_picture(np.full((4, 4, 3), shade, np.uint8)) for shade in (0, 200)]
    keys = []
    for shade in shades:
        data = base64.b64encode(shade.png).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        chat = {"type": "image_url", "image_url": {"url": shade.data_url}}
        parts = [chat, {"type": "image", "source": source}, {"type": "input_image", "image_url": shade.data_url}]
        lines = [
            {"task_id": "t", "reward": 1, name: [{"role": "user", "content": [part]}, {**call("x"), "content": "go"}]}
            for name, part in zip(("messages", "messages", "items"), parts)
        ]
        traces = trajectories_of_traces(lines)
        steps = [trajectory.steps[0] for trajectory in traces.trajectories]
        assert [step.images for step in steps] == [[shade]] * 3 and not traces.skipped
        keys.append({step.key for step in steps})
    assert [len(one) for one in keys] == [1, 1] and keys[0] != keys[1]


@pytest.mark.parametrize("asked", ["messages", "input"])
def test_an_output_in_each_form_is_the_response(asked):
    """Texts and chat completions, in the fields that many libraries name so."""
    chat = conversation("kitchen", "mug")
    outputs = ["4", chat[4], [chat[4]], {"choices": [{"message": chat[4]}]}]
    lines = [
        {"task_id": "t", "episode_id": n, "reward": 1, asked: chat[:4], "output": output}
        for n, output in enumerate(outputs)
    ]
    (expected,) = trajectories_of_traces([{"task_id": "t", "reward": 1, "messages": chat[:5]}]).trajectories
    steps = [trajectory.steps for trajectory in trajectories_of_traces(lines).trajectories]
    assert [action_text(one) for (one,) in steps] == ["4", *[action_text(expected.steps[1])] * 3]
    assert {one.key for (one,) in steps} == {expected.steps[1].key}
    (one,) = trajectories_of_traces([{**lines[0], "input": "2 + 2?", "messages": None}]).trajectories
    assert (one.steps[0].observation, action_text(one.steps[0])) == ("user: 2 + 2?", "4")


@pytest.mark.parametrize("beside", ["system", "thoughts", "answers"])
def test_calls_beside_blocks_stay(beside):
    """Chat completions with the system message apart, and with blocks of thoughts in messages that call tools."""
    thought = [{"type": "thinking", "thinking": "…"}, {"type": "text", "text": ""}]
    tools = [{"type": "function", "function": {"name": "go"}}]
    line = {"task_id": "mug", "reward": 8, "tools": tools, "messages": conversation("kitchen", "mug")}
    system, *walk = line["messages"]
    thoughts = [{**one, "content": thought} if "tool_calls" in one else one for one in walk]
    calls = [{**one, "response": {**one["response"], "content": thought}} for one in as_calls(line["messages"])]
    other = {
        "system": {**line, "messages": walk, "system": system["content"]},
        "thoughts": {**line, "messages": [system, *thoughts]},
        "answers": {**{name: one for name, one in line.items() if name != "messages"}, "calls": calls},
    }[beside]
    traces = trajectories_of_traces([line, other])
    one, two = ([(s.action, s.key, s.observation) for s in t.steps] for t in traces.trajectories)
    assert one == two and "kitchen" in one[0][0] and "tools.function" not in traces.skipped


def test_fields_that_are_null_are_missing():
    """As writers of records leave them, in each form."""
    nulls = dict.fromkeys(
        ("messages", "calls", "request", "response", "input", "system", "episode_id", "id", "success")
    )
    body = {**nulls, "messages": [TASK], "previous_response_id": None}
    calls = [{**nulls, "request": body, "response": "ok"}, {**nulls, "messages": [TASK], "response": "ok"}]
    lines = [{**nulls, **LINE}, {**nulls, "task_id": "t", "reward": None, "calls": calls}, {**nulls, **CALL}]
    traces = trajectories_of_traces([*lines, {**nulls, "task_id": "t", "episode_id": "e", "reward": 0}])
    assert [(t.outcome, len(t.steps)) for t in traces.trajectories] == [("success", 1), ("error", 2), ("failure", 1)]
    assert not traces.unread


def test_what_a_log_contains_does_not_reach_the_terminal(tmp_path, capsys):
    asked = {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "\x1b]0;a\x07"}]}
    file = write(tmp_path / "runs.jsonl", [{**LINE, "messages": [asked, call("x")], "\ud800\x1b": 1}])
    said = outcome(capsys, "credit", file)[1]
    assert "skipped: messages.\N{REPLACEMENT CHARACTER}]0;a" in said and "\x1b" not in said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_log_in_each_of_unicodes_encodings(tmp_path, encoding):
    (tmp_path / "log.jsonl").write_text(2 * f"{json.dumps({**LINE, 'task_id': 'ü'}, ensure_ascii=False)}\n", encoding)
    assert [t.task_id for t in trajectories_of_file(tmp_path / "log.jsonl").trajectories] == ["ü", "ü"]


def test_a_result_on_a_line_of_its_own():
    lines = [{name: value for name, value in line.items() if name != "reward"} for line in single_calls()]
    results = [{"task_id": "mug", "episode_id": name, "reward": reward} for name, (reward, _) in PATHS.items()]
    traces = trajectories_of_traces([*results[:1], *lines, *results[1:]])
    assert [(t.reward, len(t.steps)) for t in traces.trajectories] == [(8, 2), (0, 2)] and not traces.unread


def test_the_published_log_of_tau_bench_is_read_as_it_is():
    lines = [{"task_id": 0, "reward": 1.0, "info": {}, "traj": conversation("x"), "trial": 0}]
    traces = trajectories_of_traces(lines)
    assert len(traces.trajectories[0].steps) == 1 and traces.unread == {"info": 1, "trial": 1}


@pytest.mark.parametrize("key", [lambda messages: None, lambda messages: messages[0]["page"]])
def test_errors_of_a_state_key_name_the_line(key):
    with refused("state_key") as error:
        trajectories_of_traces([LINE], key)
    assert str(error.value).startswith("line 1: ")
