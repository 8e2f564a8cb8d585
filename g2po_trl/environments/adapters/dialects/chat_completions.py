"""OpenAI's chat completions.

What the trainer decides (sampling, the model) is ignored and named; what would change the meaning of a completion and
cannot be given is refused. The JSON schema of an answer is written into the system message, and not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....prompts.conversation import Message
from ....utils.show import show
from .request import MODEL, AgentRequest, Completion, RefusedRequestError, chat_request, read_object, to_body

# What clients send for their own records.
_WITHOUT_EFFECT = (
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
    *("stream_options", "user"),
)
# Read by `parse`.
_READ = (
    *("max_completion_tokens", "max_tokens", "messages", "model", "n", "response_format", "stop", "stream"),
    *("tool_choice", "tools"),
)
# Value that changes nothing, and what to do about another one.
_REFUSED = {
    "n": (1, "one completion is made for each request: ask n times"),
    "logprobs": (False, "log-probabilities are not returned: leave it out"),
    "top_logprobs": (0, "log-probabilities are not returned: leave it out"),
    "modalities": (["text"], "only text is generated: leave it out"),
    "audio": (None, "only text is generated: leave it out"),
    "functions": (None, "give the functions as tools"),
    "function_call": (None, "give the functions as tools"),
}

_ASK_FOR_SCHEMA = "The final answer is a JSON object that matches this JSON schema, and nothing else:\n{schema}"


def parse(body: bytes, headers: Mapping[str, str]) -> AgentRequest:
    """Return the request in a body of `POST /v1/chat/completions`. Raises `RefusedRequestError` for an invalid one."""
    data = read_object(body)
    for name, (allowed, remedy) in _REFUSED.items():
        if name in data and data[name] != allowed:
            raise RefusedRequestError(f"{name} is {show(data[name])}: {remedy}", name)
    schema = _schema(data.get("response_format"))
    chat = chat_request(
        messages=data.get("messages"),
        tools=None if data.get("tool_choice") == "none" else _tools(data.get("tools")),
        stop=[data["stop"]] if isinstance(data.get("stop"), str) else data.get("stop", []),
        max_tokens=_max_tokens(data),
    )
    if schema is not None:
        chat = replace(chat, messages=_asking_for(schema, chat.messages))
    options = data.get("stream_options")
    fields = {"include_usage": isinstance(options, dict) and bool(options.get("include_usage"))}
    return AgentRequest(chat, _ignored(data), bool(data.get("stream")), fields)


def _tools(tools: Any) -> Any:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise RefusedRequestError(f"tools is {show(tools)}: give a list", "tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedRequestError(f"tools[{place}] is {show(tool)}: give a function with a name", "tools")
    return tools


def _schema(response_format: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`, if it has one: messages ask for JSON without a schema."""
    if response_format in (None, {"type": "text"}, {"type": "json_object"}):
        return None
    given = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        remedy = "give the type text, json_object, or json_schema with a schema"
        raise RefusedRequestError(f"response_format is {show(response_format)}: {remedy}", "response_format")
    return schema


def _asking_for(schema: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages whose first one, the system's, asks for an answer that matches a schema."""
    text = _ASK_FOR_SCHEMA.format(schema=json.dumps(schema, ensure_ascii=False))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}".strip()}, *messages[1:]]


def _max_tokens(data: Mapping[str, Any]) -> Any:
    """Return the smaller of the two fields' values; one that is no number is left to `chat_request`."""
    given = [data[name] for name in ("max_completion_tokens", "max_tokens") if name in data]
    return min(given, default=None, key=lambda value: value if type(value) is int else 0)


def _ignored(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that the trainer decides otherwise: unknown ones, and values of these that are not given."""
    given = {
        "model": data.get("model") == MODEL,
        "tool_choice": data.get("tool_choice") in ("auto", "none"),  # a call cannot be promised
        "parallel_tool_calls": data.get("parallel_tool_calls") is not False,
        "response_format": data.get("response_format") != {"type": "json_object"},
    }
    known = {*_READ, *_WITHOUT_EFFECT, *_REFUSED}
    return tuple(name for name in sorted(data) if not given.get(name, name in known))


def answer(completion: Completion, request: AgentRequest) -> bytes:
    return to_body(_written(completion))


def stream(completion: Completion, request: AgentRequest) -> bytes:
    """Return a completion as server-sent events: its role, its text, its tool calls, its end."""
    written = _written(completion)
    (choice,) = written["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for place, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": place, **call}]})
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]})
    common = {name: written[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"
    no_usage = {"usage": None} if request.fields["include_usage"] else {}
    events: list[dict[str, Any]] = [{**common, "choices": [choice], **no_usage} for choice in choices]
    if request.fields["include_usage"]:
        events.append({**common, "choices": [], "usage": written["usage"]})
    return b"".join(b"data: " + to_body(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def error(refusal: RefusedRequestError) -> bytes:
    message, kind = str(refusal), "invalid_request_error"
    return to_body({"error": {"message": message, "type": kind, "param": refusal.parameter, "code": refusal.code}})


def _written(completion: Completion) -> dict[str, Any]:
    response = completion.response
    calls = []
    for place, call in enumerate(response.tool_calls, completion.calls_before + 1):
        arguments = call["function"].get("arguments", {})  # a text is what the model wrote instead of JSON
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": call["function"]["name"], "arguments": text}
        calls.append({"id": f"call_{place}", "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": response.content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    return {
        "id": f"chatcmpl-{completion.number}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": response.finish_reason}],
        "usage": {
            "prompt_tokens": response.prompt_tokens,
            "completion_tokens": response.completion_tokens,
            "total_tokens": response.prompt_tokens + response.completion_tokens,
        },
    }


_THE_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "g2po-trl"}
ROUTES = {
    "POST /v1/chat/completions": parse,
    "GET /v1/models": lambda body, headers: to_body({"object": "list", "data": [_THE_MODEL]}),
    f"GET /v1/models/{MODEL}": lambda body, headers: to_body(_THE_MODEL),
}
