"""The protocols of agents, by their own clients: what the model reads, and what the clients read."""

import base64
import json

import numpy as np
import pytest
from scripted_agents import calls, play, says

from g2po_trl.agents.dialects import ROUTES
from g2po_trl.agents.dialects.request import Completion, RefusedRequestError
from g2po_trl.prompts.conversation import ChatResponse
from g2po_trl.utils.images import as_picture

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI_TOOLS = [
    {"type": "function", "name": "add", "description": "Add.", "parameters": NUMBER, "strict": False},
    {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
    {"type": "custom", "name": "patch", "description": "Patch."},
    {"type": "web_search"},
]
ANTHROPIC_TOOLS = [
    {"name": "add", "description": "Add.", "input_schema": NUMBER},
    {"type": "web_search_20250305", "name": "web_search"},
]


def function(name, description, parameters):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def request_of(route, **data):
    return ROUTES[f"POST {route}"][1](json.dumps(data).encode(), {})


def by_responses(task, client):
    """Calls tools by id of the last response, then sends the items again, then streams."""
    model, seen = client.openai().responses, []
    given = {"model": client.model, "tools": OPENAI_TOOLS}
    first = model.create(instructions="Be brief.", input="What is 1 + 2?", reasoning={"effort": "low"}, **given)
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "3"}
    second = model.create(previous_response_id=first.id, input=[result], instructions="Be long.", **given)
    outputs = [
        {
            "type": "function_call_output",
            "call_id": second.output[0].call_id,
            "output": [{"type": "input_text", "text": "x"}],
        },
        {"type": "custom_tool_call_output", "call_id": second.output[1].call_id, "output": "patched"},
    ]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…"}
    items = [{"role": "user", "content": "Patch."}, thought, *(one.model_dump() for one in second.output), *outputs]
    third = model.create(input=items, **given)
    with model.stream(input="Once more.", **given) as events:
        kinds = [event.type for event in events]
        last = events.get_final_response()
    seen = [first, second, third, last]
    return {
        "reward": 1.0,
        "info": {
            "ids": [one.id for one in seen],
            "texts": [one.output_text for one in seen],
            "status": [one.status for one in seen],
            "calls": [[item.type, item.name] for one in seen for item in one.output if item.type != "message"],
            "namespace": second.output[0].namespace,
            "patch": second.output[1].input,
            "tokens": first.usage.total_tokens,
            "events": kinds,
        },
    }


def test_responses_by_openai():
    script = [
        calls(("add", {"a": 1}), content="I add."),
        calls(("files.read", {}), ("patch", {"input": "*** Begin"})),
        says("done"),
        calls(("add", {"a": 2}), content="Again."),
    ]
    seen, end = play(by_responses, script)
    own = {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "call_1", **call("add", {"a": 1})}]}
    assert [one.request.messages for one in seen] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}],
        [
            {"role": "system", "content": "Be long."},
            {"role": "user", "content": "What is 1 + 2?"},
            own,
            {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        ],
        [
            {"role": "user", "content": "Patch."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "call_2", **call("files.read", {})},
                    {"id": "call_3", **call("patch", {"input": "*** Begin"})},
                ],
            },
            {"role": "tool", "content": "x", "tool_call_id": "call_2", "name": "files.read"},
            {"role": "tool", "content": "patched", "tool_call_id": "call_3", "name": "patch"},
        ],
        [{"role": "user", "content": "Once more."}],
    ]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    nothing = {"type": "object", "properties": {}}
    assert seen[0].request.tools == [
        function("add", "Add.", NUMBER),
        function("files.read", "", nothing),
        function("patch", "Patch.", text),
    ]
    assert end.info["ignored_fields"] == ["input.reasoning", "reasoning", "tools.web_search"]
    assert end.info["ids"] == ["resp_1", "resp_2", "resp_3", "resp_4"] and end.info["status"] == ["completed"] * 4
    assert end.info["texts"] == ["I add.", "", "done", "Again."]
    assert (end.info["namespace"], end.info["patch"], end.info["tokens"]) == ("files", "*** Begin", 0)
    assert end.info["calls"] == [
        ["function_call", "add"],
        ["function_call", "read"],
        ["custom_tool_call", "patch"],
        ["function_call", "add"],
    ]
    assert end.info["events"] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
    ]


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def by_messages(task, client):
    """Calls a tool, sends its result with a text, then streams, and counts."""
    pytest.importorskip("anthropic")
    model = client.anthropic().messages
    given = {"model": client.model, "max_tokens": 50, "tools": ANTHROPIC_TOOLS}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    asked = [{"role": "user", "content": "What is 1 + 2?"}]
    first = model.create(system=system, messages=asked, stop_sequences=["END"], thinking={"type": "adaptive"}, **given)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "3"}]}
    thought = {"type": "thinking", "thinking": "…", "signature": "…"}
    own = {"role": "assistant", "content": [thought, *(block.model_dump() for block in first.content)]}
    asked += [own, {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    second = model.create(messages=asked, **given)
    with model.stream(messages=[{"role": "user", "content": "Once more."}], **given) as events:
        kinds = [event.type for event in events]
        last = events.get_final_message()
    count = model.count_tokens(model=client.model, messages=[{"role": "user", "content": "word " * 100}])
    seen = [first, second, last]
    return {
        "reward": 1.0,
        "info": {
            "ids": [one.id for one in seen],
            "ends": [one.stop_reason for one in seen],
            "blocks": [[block.type for block in one.content] for one in seen],
            "input": last.content[1].input,
            "events": kinds,
            "count": count.input_tokens,
        },
    }


def test_messages_by_anthropic():
    script = [calls(("add", {"a": 1}), content="I add."), says("3"), calls(("add", {"a": 2}), content="Again.")]
    seen, end = play(by_messages, script)
    first, second, third = (one.request for one in seen)
    assert first.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 2?"},
    ]
    assert first.tools == [function("add", "Add.", NUMBER)] and (first.stop, first.max_tokens) == (("END",), 50)
    assert second.messages == [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "call_1", **call("add", {"a": 1})}]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        {"role": "user", "content": "So?"},
    ]
    assert third.messages == [{"role": "user", "content": "Once more."}]
    assert end.info["ignored_fields"] == ["messages.thinking", "thinking", "tools.web_search_20250305"]
    assert end.info["ids"] == ["msg_1", "msg_2", "msg_3"] and end.info["ends"] == ["tool_use", "end_turn", "tool_use"]
    assert end.info["blocks"] == [["text", "tool_use"], ["text"], ["text", "tool_use"]]
    assert end.info["input"] == {"a": 2} and 100 < end.info["count"] < 200
    started = ["content_block_start", "content_block_delta"]
    assert [kind for kind in end.info["events"] if kind not in ("text", "input_json")] == [
        *("message_start", *started, "content_block_stop", *started, "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


FIRST, SECOND = (as_picture(np.full((4, 4, 3), shade, np.uint8)) for shade in (0, 200))


def in_base64(picture):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture.png).decode()}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


# By protocol: a text and an image as parts.
TEXT = {"chat": "text", "responses": "input_text", "messages": "text"}
IMAGE = {
    "chat": lambda picture: {"type": "image_url", "image_url": {"url": picture.data_url}},
    "responses": lambda picture: {"type": "input_image", "image_url": picture.data_url},
    "messages": in_base64,
}


def looking(task, client):
    """Shows two images between texts, and one in a tool's result; the second request is streamed."""
    protocol = task["protocol"]
    shown = [{"type": TEXT[protocol], "text": "a"}, IMAGE[protocol](FIRST), IMAGE[protocol](SECOND)]
    shown += [{"type": TEXT[protocol], "text": text} for text in "bc"]
    result, asked = shown[1::-1], [{"role": "user", "content": shown}]
    if protocol == "messages":
        pytest.importorskip("anthropic")
        given = {"model": client.model, "max_tokens": 9}
        model = client.anthropic().messages
        first = model.create(messages=asked, **given)
        block = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": result}
        asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [block, shown[2]]}]
        with model.stream(messages=asked, **given) as events:
            return float(events.get_final_text() == "seen")
    if protocol == "responses":
        model = client.openai().responses
        first = model.create(model=client.model, input=asked)
        output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": result}
        asked += [*first.output, output, {"role": "user", "content": [shown[2]]}]
        with model.stream(model=client.model, input=asked) as events:
            last = events.get_final_response()
        again = {"previous_response_id": first.id, "input": [output, {"role": "user", "content": [shown[2]]}]}
        return float(last.output_text == model.create(model=client.model, **again).output_text == "seen")
    model = client.openai().chat.completions
    first = model.create(model=client.model, messages=asked).choices[0].message
    asked += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": result}]
    asked += [{"role": "user", "content": [shown[2]]}]
    chunks = list(model.create(model=client.model, messages=asked, stream=True))
    return float(chunks[1].choices[0].delta.content == "seen")


def test_images_in_each_protocol():
    """Texts and images keep their order, the conversation is the same one, and so is the state."""
    script = [calls(("look", {})), says("seen"), says("seen")]
    chat, end = play(looking, script, protocol="chat")
    assert end.reward == 1.0 and end.info == {}
    user = {"role": "user", "content": "a\ufffc\ufffcb\nc", "images": [FIRST, SECOND]}
    tool = {"role": "tool", "content": "\ufffca", "images": [FIRST], "tool_call_id": "call_1", "name": "look"}
    assert chat[0].request.messages == [user]
    assert chat[1].request.messages[2:] == [tool, {"role": "user", "content": "\ufffc", "images": [SECOND]}]
    for protocol in ("responses", "messages"):
        seen, end = play(looking, script, protocol=protocol)
        assert end.reward == 1.0 and end.info == {}
        for number, one in enumerate(seen):
            wanted = chat[min(number, 1)]
            assert (one.request.messages, one.state_key) == (wanted.request.messages, wanted.state_key)
            assert [image.png for image in one.images] == [image.png for image in wanted.images]


_URL = "https://a.b/c.png"


NO_IMAGES = {
    "responses": [
        *({"type": "input_image", "image_url": url} for url in (_URL, "data:application/pdf;base64,AA", "data:,?")),
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_file", "file_data": "…"},
    ],
    "messages": [
        {"type": "document"},
        *(
            {"type": "image", "source": {"type": "base64", **source}}
            for source in ({"type": "url", "url": _URL}, {"media_type": "image/png"}, {"data": "aGk="})
        ),
    ],
}


@pytest.mark.parametrize(("protocol", "part"), [(name, part) for name, parts in NO_IMAGES.items() for part in parts])
@pytest.mark.parametrize("in_result", [False, True])
def test_images_that_are_refused(protocol, part, in_result):
    content = [{"type": TEXT[protocol], "text": "a"}, part]
    asked = [{"role": "user", "content": content}]
    if in_result:
        call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": content}
        asked = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        if protocol == "responses":
            asked = [{"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}]
            asked += [{"type": "function_call_output", "call_id": "1", "output": content}]
    own = [{"role": "assistant", "content": [{"type": TEXT[protocol], "text": "a"}, IMAGE[protocol](FIRST)]}]
    field = "input" if protocol == "responses" else "messages"
    for items in (asked, own):
        with pytest.raises(RefusedRequestError) as raised:
            request_of(f"/v1/{protocol}", **{field: items})
        assert raised.value.parameter == field


SAID = {"role": "user", "content": "a"}
REQUESTS = {"chat/completions": {"messages": [SAID]}, "responses": {"input": "a"}, "messages": {"messages": [SAID]}}
UNNAMED_FORM = {"type": "json_schema"}


def with_part(part):
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("route", "field", "values"),
    [
        ("chat/completions", "messages", [None, with_part({"type": {}})]),
        ("chat/completions", "tools", [{}, [{"type": "web_search"}]]),
        ("chat/completions", "n", [2]),
        ("chat/completions", "logprobs", [True]),
        ("chat/completions", "modalities", [["text", "audio"]]),
        ("chat/completions", "functions", [[{}]]),
        ("chat/completions", "stop", [1]),
        ("chat/completions", "max_tokens", ["5"]),
        ("chat/completions", "response_format", [UNNAMED_FORM]),
        ("responses", "input", [None, [{"type": "computer_call"}], ["a"], [{"type": "function_call"}]]),
        ("responses", "input", [with_part({"type": "input_image"}), with_part({"type": "text", "text": None})]),
        ("responses", "tools", [3, [{"type": "function"}]]),
        ("responses", "prompt", [{"id": "p"}]),
        ("responses", "background", [True]),
        ("responses", "top_logprobs", [2]),
        ("responses", "include", [["message.output_text.logprobs"]]),
        ("responses", "text", [{"format": UNNAMED_FORM}]),
        ("responses", "max_output_tokens", [0]),
        ("messages", "messages", [None, [], ["a"], with_part({"type": "image"}), with_part({"type": "text"})]),
        ("messages", "tools", [[{}]]),
        ("messages", "thread", ["new"]),
        ("messages", "compaction", [{"type": "x"}]),
    ],
)
def test_what_cannot_be_answered_is_refused(route, field, values):
    of_chat = {"max_output_tokens": "max_tokens"}  # names that are not the request's
    for value in values:
        with pytest.raises(RefusedRequestError) as raised:
            request_of(f"/v1/{route}", **{**REQUESTS[route], field: value})
        assert raised.value.parameter == of_chat.get(field, field) and raised.value.status == 400


FORM = {"type": "json_schema", "schema": {}}
MADE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}
FAILED = {"role": "user", "content": [RESULT]}
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("route", "data", "ignored"),
    [
        ("messages", {"messages": [SAID, MADE, FAILED]}, "messages.tool_result.is_error"),
        ("messages", {"messages": [SAID, {"role": "assistant", "content": "{"}]}, "messages.prefill"),
        ("messages", {"messages": [SAID], "tool_choice": ONE_CALL}, "tool_choice"),
        ("messages", {"messages": [SAID], "output_config": {"format": FORM}}, None),
        ("messages", {"messages": [SAID], "output_config": {"format": FORM, "effort": "low"}}, "output_config"),
        ("responses", {"input": [{"type": None, **SAID}], "top_logprobs": 0, "include": []}, None),
        ("responses", {"input": "a", "text": {"format": FORM}}, None),
        ("responses", {"input": "a", "text": {"verbosity": "low"}}, "text"),
        ("responses", {"input": "a", "text": 3}, "text"),
        ("chat/completions", {"messages": [{**SAID, "name": "ann"}]}, "messages.name"),
        ("chat/completions", {"messages": [{**SAID, "role": "tool", "name": "ann"}]}, None),
    ],
)
def test_what_has_no_effect_is_named(route, data, ignored):
    assert request_of(f"/v1/{route}", **data).ignored == ((ignored,) if ignored else ())


@pytest.mark.parametrize("name", ["resp_7", "", ["resp_1"]])
def test_a_response_of_another_episode_is_unknown(name):
    def agent(task, client):
        model = client.openai(max_retries=0).responses
        model.create(model=client.model, input="a")
        model.create(model=client.model, input="b", extra_body={"previous_response_id": name})

    _, end = play(agent, [says("first")])
    assert end.info["failure_reason"].startswith("agent error: BadRequestError")
    assert f"{name!r} is not a response of this episode" in end.info["refusal"]


def by_a_tool_runner(task, client):
    """Anthropic's own loop, which sends the new messages alone, and neither tools nor system message again."""
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: one.
            b: the other.
        """
        return str(a + b)

    given = {"model": client.model, "max_tokens": 9, "system": "Be brief.", "tools": [add]}
    asked = [{"role": "user", "content": "1 + 2?"}]
    runner = client.anthropic().beta.messages.tool_runner(
        messages=asked, output_config={"format": {"type": "json_schema", "schema": {"title": "sum"}}}, **given
    )
    return float(runner.until_done().content[0].text == "3")


def test_a_thread_keeps_its_messages_and_tools():
    seen, end = play(by_a_tool_runner, [calls(("add", {"a": 1, "b": 2})), says("3")])
    first, second = (one.request for one in seen)
    assert first.messages[0]["content"].startswith("Be brief.") and "sum" in first.messages[0]["content"]
    made = [{"id": "call_1", **call("add", {"a": 1, "b": 2})}]
    assert second.messages == [
        *first.messages,
        {"role": "assistant", "content": "", "tool_calls": made},
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
    ]
    assert second.tools and second.tools == first.tools and end.reward == 1.0
    assert "ignored_fields" not in end.info


# By route: where a response has its end and the first call's arguments.
ANSWERS = {
    "chat/completions": (
        lambda body: body["choices"][0]["finish_reason"],
        lambda body: body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
    ),
    "responses": (
        lambda body: body["incomplete_details"]["reason"],
        lambda body: body["output"][0]["arguments"],
    ),
    "messages": (lambda body: body["stop_reason"], lambda body: body["content"][0]["input"]["arguments"]),
}


@pytest.mark.parametrize("route", ANSWERS)
def test_what_each_dialect_writes(route):
    """Of a completion that reached its limit, of arguments that are no object, of a refusal, and of any text.

    Some clients, such as `httpx` by `iter_lines`, end a line of a stream at any of Unicode's separators.
    """
    dialect, (end_of, arguments_of) = ROUTES[f"POST /v1/{route}"][0], ANSWERS[route]
    request, text = request_of(f"/v1/{route}", **REQUESTS[route]), "a\u2028b\u2029c\x85d\x1ce\x0bf"
    cut = dialect.answer(Completion(ChatResponse("cut", finish_reason="length"), 1, 0), request)
    assert end_of(cut) in ("length", "max_tokens", "max_output_tokens")
    spoiled = Completion(ChatResponse("", (call("add", "1 +"),), "tool_calls"), 1, 0)
    assert arguments_of(dialect.answer(spoiled, request)) == "1 +"
    refusal = dialect.error(RefusedRequestError("stop is 3", "stop", status=404))
    assert refusal["error"]["message"] == "stop is 3"
    odd = Completion(ChatResponse(text, (call("add", {"ä": text}),), "tool_calls"), 1, 0)
    lines = dialect.stream(dialect.answer(odd, request), request).decode().splitlines()
    assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
