"""OpenAI's chat-completions protocol: request bodies as `ChatRequest`s, `ChatResponse`s as response bodies.

What the trainer decides (sampling, the model) is ignored and named; what would change the meaning of a completion and
cannot be given is refused. The JSON schema of an answer is written into the system message, and not enforced.
Responses contain neither time nor randomness: a replayed episode gets the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...prompts.conversation import MAX_DEPTH, ChatRequest, ChatResponse, Message, is_deeper
from ...utils.show import show

MODEL = "policy"
# What clients send for their own records.
_WITHOUT_EFFECT = (
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
    *("stream_options", "user"),
)
# Read by `read_request`.
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


class RefusedRequestError(ValueError):
    """A request that is answered by an error, and is no step of the episode.

    Args:
        message: what is wrong, and what to do.
        parameter: the field of the request.
        code: a word for programs.
        status: the HTTP status. Clients retry 408, 409, 429 and those from 500; agents around them also 400 and 403.
    """

    def __init__(self, message: str, parameter: str | None = None, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status

    def body(self) -> bytes:
        """Return the body of the response."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self.parameter, "code": self.code}
        return _to_json({"error": error})


@dataclass(frozen=True)
class CompletionRequest:
    """A request of a client.

    Args:
        chat: what the model is asked.
        ignored: names of fields that the trainer decides otherwise.
        stream: the response is sent as events.
        include_usage: the last event reports the number of tokens.
    """

    chat: ChatRequest
    ignored: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def read_request(body: bytes) -> CompletionRequest:
    """Return the request in a body of `POST /v1/chat/completions`. Raises `RefusedRequestError` for an invalid one."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise RefusedRequestError(f"the body is not valid JSON ({error}): send a JSON object") from error
    if not isinstance(data, dict):
        raise RefusedRequestError("the body is not a JSON object: send one with messages")
    data = {name: value for name, value in data.items() if value is not None}
    for name, (allowed, remedy) in _REFUSED.items():
        if name in data and data[name] != allowed:
            raise RefusedRequestError(f"{name} is {show(data[name])}: {remedy}", name)
    chat = {
        "messages": data.get("messages"),
        "tools": _tools(data.get("tools")),
        "stop": [data["stop"]] if isinstance(data.get("stop"), str) else data.get("stop", []),
        "max_tokens": _max_tokens(data),
    }
    if data.get("tool_choice") == "none":
        chat["tools"] = None
    schema = _schema(data.get("response_format"))
    try:
        request = ChatRequest.from_dict(chat)
        if schema is not None:
            request = replace(request, messages=_asking_for(schema, request.messages))
        if is_deeper(request.to_dict(), MAX_DEPTH):
            raise RecursionError(f"the request is nested more than {MAX_DEPTH} levels deep: flatten it")
        if b"\\ud" in body.lower():  # surrogates, which cannot be tokenized where they are no pairs
            request = ChatRequest.from_dict(json.loads(_to_json(request.to_dict())))
    except (ValueError, RecursionError) as error:
        parameter = next((name for name in chat if str(error).startswith(name)), None)
        raise RefusedRequestError(str(error), parameter) from error
    options = data.get("stream_options")
    include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return CompletionRequest(request, tuple(_ignored(data)), bool(data.get("stream")), include_usage)


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
    """Return the smaller of the two fields' values; one that is no number is left to `ChatRequest`."""
    given = [data[name] for name in ("max_completion_tokens", "max_tokens") if name in data]
    return min(given, default=None, key=lambda value: value if type(value) is int else 0)


def _ignored(data: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(data.items()):
        if name == "model":
            ignored = value != MODEL
        elif name == "tool_choice":  # a call cannot be promised
            ignored = value not in ("auto", "none")
        elif name == "parallel_tool_calls":
            ignored = value is False
        elif name == "response_format":
            ignored = value == {"type": "json_object"}
        else:
            ignored = name not in _READ and name not in _WITHOUT_EFFECT and name not in _REFUSED
        if ignored:
            yield name


def write_completion(response: ChatResponse, number: int, calls_before: int) -> dict[str, Any]:
    """Return a response's body as JSON data: the `number`-th of its episode, after `calls_before` tool calls."""
    calls = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _arguments_text(call["function"].get("arguments", {})),
            },
        }
        for place, call in enumerate(response.tool_calls, calls_before + 1)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": response.content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": response.finish_reason},
        ],
        "usage": {
            "prompt_tokens": response.prompt_tokens,
            "completion_tokens": response.completion_tokens,
            "total_tokens": response.prompt_tokens + response.completion_tokens,
        },
    }


def completion_body(completion: Mapping[str, Any]) -> bytes:
    """Return a completion as the body of a response."""
    return _to_json(completion)


def event_stream(completion: Mapping[str, Any], include_usage: bool) -> bytes:
    """Return a completion as server-sent events: its role, its text, its tool calls, its end."""
    (choice,) = completion["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for place, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": place, **call}]})
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]})
    common = {name: completion[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"
    no_usage = {"usage": None} if include_usage else {}
    events: list[dict[str, Any]] = [{**common, "choices": [choice], **no_usage} for choice in choices]
    if include_usage:
        events.append({**common, "choices": [], "usage": completion["usage"]})
    return b"".join(b"data: " + _to_json(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def model_body() -> dict[str, Any]:
    """Return the description of the only model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "g2po-trl"}


def models_body(path: str) -> bytes:
    """Return the answer to `GET /v1/models`, or to that of one model."""
    one = path.removeprefix("/v1/models").strip("/")
    return _to_json(model_body() if one else {"object": "list", "data": [model_body()]})


def _arguments_text(arguments: Any) -> str:
    """Return the arguments as JSON text; text that the model wrote instead of JSON is left as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _to_json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
