"""OpenAI's chat completions.

What the trainer decides (sampling, the model) is ignored and named; what would change the meaning of a completion and
cannot be given is refused. The JSON schema of an answer is written into the system message, and not enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .request import MODEL, AgentRequest, Completion, RefusedRequestError, function_tool, read_fields, to_body

_READ = ("max_completion_tokens", "max_tokens", "messages", "response_format", "stop", "stream", "tools")
_REFUSED = {
    "n": (1, "each request gets one completion: send n requests"),
    "logprobs": (False, "log-probabilities are not returned: leave it out"),
    "top_logprobs": (0, "log-probabilities are not returned: leave it out"),
    "modalities": (["text"], "only text is generated: leave it out"),
    "audio": (None, "only text is generated: leave it out"),
    "functions": (None, "give the functions as tools"),
    "function_call": (None, "give the functions as tools"),
}
KEY_HEADER = ("authorization", "Bearer ")
VARIABLES = {"OPENAI_MODEL": "model", "OPENAI_API_KEY": "api_key"}
VARIABLES |= {"OPENAI_BASE_URL": "base_url", "OPENAI_API_BASE": "base_url"}


def parse(body: bytes, headers: Mapping[str, str]) -> AgentRequest:
    """Return the request in a body of `POST /v1/chat/completions`. Raises `RefusedRequestError` for an invalid one."""
    data, ignored = read_fields(body, _READ, _REFUSED)
    messages, tools, form = (data.get(name) for name in ("messages", "tools", "response_format"))
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = form.get("json_schema") or {}
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        is_function = isinstance(tool, dict) and tool.get("type") == "function"  # with a name, or it is refused:
        function_tool(tool.get("function") if is_function else None, f"tools[{index}]", "parameters")
    limits = [data[name] for name in ("max_completion_tokens", "max_tokens") if name in data]
    chat = {
        "messages": messages,
        "tools": tools,
        "stop": [data["stop"]] if isinstance(data.get("stop"), str) else data.get("stop", []),
        "max_tokens": min(limits, default=None, key=lambda value: value if type(value) is int else 0),
    }
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("name") and message.get("role") != "tool":  # of who speaks
            ignored.add("messages.name")
    schema, options = ignored.schema("response_format", {"format": form}), data.get("stream_options")
    fields = {"include_usage": isinstance(options, dict) and bool(options.get("include_usage"))}
    return AgentRequest.of(data, ignored, chat, schema=schema, fields=fields)


def error(refusal: RefusedRequestError) -> dict[str, Any]:
    message, kind = str(refusal), "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": refusal.parameter, "code": refusal.code}}


def stream(written: Mapping[str, Any], request: AgentRequest) -> bytes:
    """Return a response as server-sent events: its role, its text, its tool calls, its end."""
    (choice,) = written["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]})
    common = {name: written[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"
    no_usage = {"usage": None} if request.fields["include_usage"] else {}
    events: list[dict[str, Any]] = [{**common, "choices": [choice], **no_usage} for choice in choices]
    if request.fields["include_usage"]:
        events.append({**common, "choices": [], "usage": written["usage"]})
    return b"".join(b"data: " + to_body(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def answer(completion: Completion, request: AgentRequest) -> dict[str, Any]:
    response = completion.response
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, _, arguments in completion.calls()
    ]
    message = {"role": "assistant", "content": response.content or (None if calls else "")}
    message |= {"tool_calls": calls} if calls else {}
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
    "GET /v1/models": lambda body, headers: {"object": "list", "data": [_THE_MODEL]},
    f"GET /v1/models/{MODEL}": lambda body, headers: _THE_MODEL,
}
