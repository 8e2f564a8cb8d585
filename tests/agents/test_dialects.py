"""The protocols of agents, by their own clients: what the model reads, and what the clients read."""

import base64
import json
import re
from fnmatch import fnmatchcase

import numpy as np
import pytest
from scripted_agents import calls, play, says

from g2po_trl.agents.dialects import ROUTES
from g2po_trl.agents.dialects.request import Completion, RefusedRequestError, to_stream
from g2po_trl.prompts.conversation import ChatResponse
from g2po_trl.utils.images import as_picture

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
NOTHING = {"type": "object", "properties": {}}
TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
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
ASKED = "user: What is 1 + 2?"


def tools_of(request):
    functions = [tool["function"] for tool in request.tools]
    return [(one["name"], one["description"], one["parameters"]) for one in functions]


def talk_of(request):
    """The messages as texts, with the ids and arguments of calls; a result's by its tool's name and the call's id."""
    talk = []
    for message in request.messages:
        calls = [(one["id"], *one["function"].values()) for one in message.get("tool_calls", ())]
        made = "".join(f" {id}={name}{json.dumps(arguments)}" for id, name, arguments in calls)
        who = "/".join(message[name] for name in ("name", "tool_call_id") if name in message) or message["role"]
        talk.append(f"{who}: {message['content']}{made}")
    return talk


GOOGLE = "models/policy:generateContent"


def served(route):
    """The dialect of a route, and its reader."""
    return next(ROUTES[one] for one in ROUTES if fnmatchcase(f"POST /v1/{route}", one))


def request_of(route, **data):
    return served(route)[1](json.dumps(data).encode())


def by_responses(task, client):
    """Calls tools by id of the last response, then sends the items again, then streams."""
    model, given = client.openai().responses, {"model": client.model, "tools": OPENAI_TOOLS}
    first = model.create(instructions="Be brief.", input="What is 1 + 2?", reasoning={"effort": "low"}, **given)
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "3"}
    second = model.create(previous_response_id=first.id, input=[result], instructions="Be long.", **given)
    read, patched = ({"call_id": item.call_id} for item in second.output)
    read |= {"type": "function_call_output", "output": [{"type": "input_text", "text": "x"}]}
    patched |= {"type": "custom_tool_call_output", "output": "patched"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…"}
    made = [item.model_dump() for item in second.output]
    third = model.create(input=[{"role": "user", "content": "Patch."}, thought, *made, read, patched], **given)
    with model.stream(input="Once more.", **given) as events:
        kinds = [event.type.removeprefix("response.") for event in events]
        seen = [first, second, third, events.get_final_response()]
    assert (second.output[0].namespace, second.output[1].input) == ("files", "*** Begin")
    assert [one.id for one in seen] == ["resp_1", "resp_2", "resp_3", "resp_4"]
    assert {one.status for one in seen} == {"completed"} and first.usage.total_tokens == 0
    items = [item for one in seen for item in one.output if item.type != "message"]
    info = {"calls": [f"{item.type} {item.name}" for item in items], "events": kinds}
    return 1.0, True, info | {"texts": [one.output_text for one in seen]}


def test_responses_by_openai():
    patch = ("patch", {"input": "*** Begin"})
    script = [calls(("add", {"a": 1}), content="I add."), calls(("files.read", {}), patch), says("done")]
    seen, end = play(by_responses, [*script, calls(("add", {"a": 2}), content="Again.")])
    own = 'assistant:  call_2=files.read{} call_3=patch{"input": "*** Begin"}'
    assert [talk_of(one.request) for one in seen] == [
        ["system: Be brief.", ASKED],
        ["system: Be long.", ASKED, 'assistant: I add. call_1=add{"a": 1}', "add/call_1: 3"],
        ["user: Patch.", own, "files.read/call_2: x", "patch/call_3: patched"],
        ["user: Once more."],
    ]
    described = [("add", "Add.", NUMBER), ("files.read", "", NOTHING), ("patch", "Patch.", TEXT_INPUT)]
    assert tools_of(seen[0].request) == described
    assert end.info["ignored_fields"] == ["input.reasoning", "reasoning", "tools.web_search"]
    assert end.info["texts"] == ["I add.", "", "done", "Again."]
    function, patch = "function_call ", "custom_tool_call patch"
    assert end.info["calls"] == [f"{function}add", f"{function}read", patch, f"{function}add"]
    assert end.info["events"] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]


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
        kinds = [event.type for event in events if event.type not in ("text", "input_json")]
        seen = [first, second, events.get_final_message()]
    count = model.count_tokens(model=client.model, messages=[{"role": "user", "content": "word " * 100}])
    assert [one.id for one in seen] == ["msg_1", "msg_2", "msg_3"] and 100 < count.input_tokens < 200
    assert [one.stop_reason for one in seen] == ["tool_use", "end_turn", "tool_use"]
    blocks = [[block.type for block in one.content] for one in seen]
    return 1.0, True, {"blocks": blocks, "input": seen[2].content[1].input, "events": kinds}


def test_messages_by_anthropic():
    script = [calls(("add", {"a": 1}), content="I add."), says("3"), calls(("add", {"a": 2}), content="Again.")]
    seen, end = play(by_messages, script)
    assert [talk_of(one.request) for one in seen] == [
        ["system: Be brief.", ASKED],
        [ASKED, 'assistant: I add. call_1=add{"a": 1}', "add/call_1: 3", "user: So?"],
        ["user: Once more."],
    ]
    first = seen[0].request
    assert (tools_of(first), first.stop, first.max_tokens) == ([("add", "Add.", NUMBER)], ("END",), 50)
    assert end.info["ignored_fields"] == ["messages.thinking", "thinking", "tools.web_search_20250305"]
    assert end.info["blocks"] == [["text", "tool_use"], ["text"], ["text", "tool_use"]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert end.info["events"] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert end.info["input"] == {"a": 2}


def by_google(task, client):
    """Calls two tools, sends their results and an image, then streams, fails, and counts."""
    types, errors = (pytest.importorskip(f"google.genai.{name}") for name in ("types", "errors"))
    google, text = client.gemini(), types.Part.from_text  # which closes its connections when it is collected
    model = google.models
    older = types.Schema(type="OBJECT", properties={"a": types.Schema(type="INTEGER")})
    add = types.FunctionDeclaration(name="add", description="Add.", parameters=older)
    again = types.FunctionDeclaration(name="again", parameters_json_schema=NUMBER)
    own = [types.Tool(function_declarations=[add, again]), types.Tool(google_search=types.GoogleSearch())]
    given = {"system_instruction": "Be brief.", "tools": own, "stop_sequences": ["END"], "max_output_tokens": 50}
    given |= {"temperature": 0.3, "thinking_config": types.ThinkingConfig(include_thoughts=True)}
    talk = [types.Content(role="user", parts=[text(text="What is 1 + 2?")])]
    first = model.generate_content(model=client.model, contents=talk, config=given)
    answers = zip(first.function_calls, ({"result": "3"}, {"sum": 4}))
    results = [types.Part.from_function_response(name=one.name, response=answer) for one, answer in answers]
    thought, image = types.Part(text="…", thought=True), types.Part.from_bytes(data=FIRST.png, mime_type="image/png")
    talk += [first.candidates[0].content, types.Content(role="user", parts=results)]
    talk += [types.Content(role="model", parts=[thought, text(text="So?")]), types.Content(role="user", parts=[image])]
    second = model.generate_content(model=client.model, contents=talk, config=given)
    third = list(model.generate_content_stream(model=client.model, contents="Once more.", config=given))
    wanted = {"response_mime_type": "application/json", "response_json_schema": {"title": "sum"}}
    fourth = model.generate_content(model=client.model, contents="JSON", config=wanted)
    with pytest.raises(errors.ClientError) as raised:
        model.generate_content(model=client.model, contents="a", config={"candidate_count": 2})
    assert (raised.value.code, raised.value.status) == (400, "INVALID_ARGUMENT")
    count = model.count_tokens(model=client.model, contents="word " * 100)
    assert 100 < count.total_tokens < 200 and first.usage_metadata.total_token_count == 0
    calls = [(one.id, one.name, one.args) for made in (first, *third) for one in made.function_calls or ()]
    ends = [one.candidates[0].finish_reason.name for one in (first, second, *third, fourth)]
    return 1.0, True, {"calls": calls, "ends": ends, "texts": [second.text, third[-1].text], "parsed": fourth.parsed}


def test_generate_content_by_google():
    pytest.importorskip("google.genai")
    script = [calls(("add", {"a": 1}), ("again", {"a": 2}), content="I add."), says("3", finish_reason="length")]
    seen, end = play(by_google, [*script, calls(("add", {"a": 3}), content="Again."), says('{"sum": 3}')])
    made = ['assistant: I add. call_1=add{"a": 1} call_2=again{"a": 2}', "add: 3", 'again: {"sum": 4}']
    assert talk_of(seen[0].request) == ["system: Be brief.", ASKED]
    assert talk_of(seen[1].request)[2:] == [*made, "assistant: So?", "user: \ufffc"]
    assert seen[1].request.messages[-1]["images"] == [FIRST] and "sum" in seen[3].request.messages[0]["content"]
    first = seen[0].request
    assert tools_of(first) == [("add", "Add.", NUMBER), ("again", "", NUMBER)]
    assert (first.stop, first.max_tokens) == (("END",), 50)
    assert end.info["ignored_fields"] == ["contents.thought", "temperature", "thinkingConfig", "tools.googleSearch"]
    assert end.info["calls"] == [(f"call_{n}", name, {"a": n}) for n, name in enumerate(("add", "again", "add"), 1)]
    assert (end.info["ends"], end.info["texts"]) == (["STOP", "MAX_TOKENS", "STOP", "STOP"], ["3", "Again."])
    assert end.info["parsed"] == {"sum": 3} and end.info["refused_requests"] == 1


def test_tools_are_offered_once_they_are_found():
    """As Claude Code searches for tools; what Anthropic's own search found is left out."""
    later = [{"name": name, "defer_loading": True, "input_schema": NOTHING} for name in ("fetch", "Placeholder")]
    asked = [SAID, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]}]
    references = [{"type": "tool_reference", "tool_name": "fetch"}, {"type": "text", "text": "found"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": references}
    theirs = [{"type": "server_tool_use", "id": "s"}, {"type": "tool_search_tool_result", "content": {}}]
    answered = [*asked, {"role": "user", "content": [result, *theirs]}]
    for talk, names in ((asked, ["add"]), (answered, ["add", "fetch"])):
        request = request_of("messages", messages=talk, tools=[*ANTHROPIC_TOOLS, *later])
        assert [tool["function"]["name"] for tool in request.chat.tools] == names
    assert request.chat.messages[-1]["content"] == "fetch\nfound"
    assert request.ignored[:2] == ("messages.server_tool_use", "messages.tool_search_tool_result")


FIRST, SECOND = (as_picture(np.full((4, 4, 3), shade, np.uint8)) for shade in (0, 200))


def in_base64(picture):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture.png).decode()}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


# By route: a text's kind, an image, and the messages of a request that shows both, also in a tool's result.
PARTS = {
    "chat/completions": ("text", lambda picture: {"type": "image_url", "image_url": {"url": picture.data_url}}),
    "responses": ("input_text", lambda picture: {"type": "input_image", "image_url": picture.data_url}),
    "messages": ("text", in_base64),
}
LOOK = {"name": "look", "arguments": "{}", "input": {}}


def showing(route, shown, result):
    user = {"role": "user", "content": shown}
    if route == "responses":
        made = {"type": "function_call", "call_id": "1", **LOOK}
        return {"input": [user, made, {"type": "function_call_output", "call_id": "1", "output": result}]}
    if route == "messages":
        made = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", **LOOK}]}
        block = {"type": "tool_result", "tool_use_id": "1", "content": result}
        return {"messages": [user, made, {"role": "user", "content": [block]}]}
    made = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": LOOK}]}
    return {"messages": [user, made, {"role": "tool", "tool_call_id": "1", "content": result}]}


@pytest.mark.parametrize("route", PARTS)
def test_texts_and_images_keep_their_order(route):
    text, image = PARTS[route]
    a, b, c = ({"type": text, "text": letter} for letter in "abc")
    first, second = image(FIRST), image(SECOND)
    request = request_of(route, **showing(route, [a, first, second, b, c], [first, a]))
    user, _, tool = request.chat.messages
    assert user == {"role": "user", "content": "a\ufffc\ufffcb\nc", "images": [FIRST, SECOND]}
    assert (tool["content"], tool["images"], tool["name"]) == ("\ufffca", [FIRST], "look") and not request.ignored
    assert [one.png for one in user["images"]] == [FIRST.png, SECOND.png]


def with_part(part, role="user"):
    return [{"role": role, "content": [part]}]


# No address is read, and no image is the model's.
URL = "https://a.b/c.png"
NO_IMAGES = {
    "responses": [
        *(with_part({"type": "input_image", "image_url": url}) for url in (URL, "data:application/pdf;base64,AA")),
        with_part({"type": "input_file"}),
        with_part(PARTS["responses"][1](FIRST), "assistant"),
        showing("responses", "a", [{"type": "input_image", "image_url": URL}])["input"],
    ],
    "messages": [
        with_part({"type": "image", "source": {"type": "url", "url": URL}}),
        with_part({"type": "image", "source": {"type": "base64", "data": "aGk="}}),
        with_part({"type": "document"}),
        with_part(in_base64(FIRST), "assistant"),
    ],
}
SAID = {"role": "user", "content": "a"}
REQUESTS = {"chat/completions": {"messages": [SAID]}, "responses": {"input": "a"}, "messages": {"messages": [SAID]}}
REQUESTS |= {GOOGLE: {"contents": [{"parts": [{"text": "a"}]}]}}
NO_PARTS = (3, {}, {"text": 3}, {"functionCall": 3}, {"fileData": {}}, {"functionResponse": {"parts": [{}]}})
FORM = {"type": "json_schema", "schema": {}}
UNNAMED = {"type": "json_schema"}
TEXTS = {"n": 2, "logprobs": True, "modalities": ["text", "audio"], "functions": [{}], "stop": 1, "max_tokens": "5"}
ALONE = {  # values that are refused, by field
    "chat/completions": TEXTS | {"response_format": UNNAMED},
    "responses": {"prompt": {"id": "p"}, "background": True, "top_logprobs": 2, "text": {"format": UNNAMED}},
    "messages": {"thread": "new", "compaction": {"type": "x"}},
    GOOGLE: {"cachedContent": "a", "generationConfig": 3, "responseMimeType": "text/x.enum"},
}


@pytest.mark.parametrize(
    ("route", "field", "values"),
    [
        ("chat/completions", "messages", [None, with_part({"type": {}})]),
        ("chat/completions", "tools", [{}, [{"type": "web_search"}]]),
        ("responses", "input", [None, [{"type": "computer_call"}], ["a"], [{"type": "function_call"}]]),
        ("responses", "input", [with_part({"type": "text", "text": None}), *NO_IMAGES["responses"]]),
        ("responses", "tools", [3, [{"type": "function"}], [{"type": 5, "name": "a"}]]),
        ("messages", "messages", [None, [], ["a"], with_part({"type": "text"}), *NO_IMAGES["messages"]]),
        ("messages", "tools", [[{}]]),
        (GOOGLE, "contents", [None, [], ["a"], [{"parts": None}], [{"role": "robot", "parts": [{"text": "a"}]}]]),
        (GOOGLE, "contents", [[{"parts": [part]}] for part in NO_PARTS]),
        (GOOGLE, "tools", [3, *([{"functionDeclarations": one}] for one in ([{}], [1], 1))]),
        *((route, field, [value]) for route, fields in ALONE.items() for field, value in fields.items()),
    ],
)
def test_what_cannot_be_answered_is_refused(route, field, values):
    for value in values:
        with pytest.raises(RefusedRequestError) as raised:
            request_of(route, **{**REQUESTS[route], field: value})
        assert raised.value.parameter == field and raised.value.status == 400


GOOGLE_TOOL = {"function_declarations": [{"name": "add"}]}
MADE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]}
FAILED = with_part({"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True})


@pytest.mark.parametrize(
    ("route", "data", "ignored"),
    [
        ("messages", {"messages": [SAID, MADE, *FAILED]}, "messages.tool_result.is_error"),
        ("messages", {"messages": [SAID, {"role": "assistant", "content": "{"}]}, "messages.prefill"),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "none"}, "tools": ANTHROPIC_TOOLS[:1]}, None),
        ("messages", {"output_config": {"format": FORM, "effort": "low"}}, "output_config"),
        ("responses", {"input": [{"type": None, **SAID}], "top_logprobs": 0}, None),
        ("responses", {"text": {"verbosity": "low"}}, "text"),
        (GOOGLE, {"contents": [{"parts": [{"executable_code": {}}, {"text": "a"}]}]}, "contents.executableCode"),
        (GOOGLE, {"tool_config": {"function_calling_config": {"mode": "NONE"}}, "tools": [GOOGLE_TOOL]}, None),
        (GOOGLE, {"tool_config": {"function_calling_config": {"mode": "ANY"}}}, "toolConfig"),
        ("chat/completions", {"messages": [{**SAID, "name": "ann"}]}, "messages.name"),
    ],
)
def test_what_has_no_effect_is_named(route, data, ignored):
    request = request_of(route, **{**REQUESTS[route], **data})
    assert request.ignored == ((ignored,) if ignored else ()) and request.chat.tools is None


@pytest.mark.parametrize("name", ["resp_7", "", ["resp_1"]])
def test_a_response_of_another_episode_is_unknown(name):
    def agent(task, client):
        model = client.openai(max_retries=0).responses
        model.create(model=client.model, input="a")
        model.create(model=client.model, input="b", extra_body={"previous_response_id": name})

    _, end = play(agent, [says("first")])
    assert end.info["failure_reason"].startswith("agent error: BadRequestError") and end.info["refused_requests"] == 1


def by_a_tool_runner(task, client):
    """Anthropic's own loop, which sends the new messages alone, and neither tools nor system message again."""
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    given = {"model": client.model, "max_tokens": 9, "system": "Be brief.", "tools": [add]}
    asked = [{"role": "user", "content": "What is 1 + 2?"}]
    form = {"format": {"type": "json_schema", "schema": {"title": "sum"}}}
    runner = client.anthropic().beta.messages.tool_runner(messages=asked, output_config=form, **given)
    return float(runner.until_done().content[0].text == "3")


def test_a_thread_keeps_its_messages_and_tools():
    seen, end = play(by_a_tool_runner, [calls(("add", {"a": 1, "b": 2})), says("3")])
    first, second = (one.request for one in seen)
    assert first.messages[0]["content"].startswith("Be brief.") and "sum" in first.messages[0]["content"]
    assert talk_of(second) == [*talk_of(first), 'assistant:  call_1=add{"a": 1, "b": 2}', "add/call_1: 3"]
    assert second.tools and second.tools == first.tools
    assert end.reward == 1.0 and "ignored_fields" not in end.info


@pytest.mark.parametrize("route", REQUESTS)
def test_what_each_dialect_writes(route):
    """Of a completion that reached its limit, of arguments that are no object, of a refusal, and of any text.

    Some clients, such as `httpx` by `iter_lines`, end a line of a stream at any of Unicode's separators.
    """

    def completion(text, arguments=None, end="tool_calls"):
        made = [{"id": "call_1", "function": {"name": "add", "arguments": arguments}}] * (arguments is not None)
        return dialect.answer(Completion(ChatResponse(text, tuple(made), end), 1), request)

    dialect, request = served(route)[0], request_of(route, **REQUESTS[route])
    assert re.search('"(length|max_tokens|max_output_tokens)"', json.dumps(completion("cut", end="length")).lower())
    assert '"arguments": "1 +"' in json.dumps(completion("", "1 +"))
    assert dialect.error(RefusedRequestError("stop is 3", "stop", status=404))["error"]["message"] == "stop is 3"
    text = "a\u2028b\u2029c\x85d\x1ce\x0bf"
    lines = to_stream(dialect.events(completion(text, {"ä": text}))).splitlines()
    assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
