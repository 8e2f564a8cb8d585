"""OpenAI's chat completions.

What the trainer decides (sampling, the model) is ignored and named; what would change the meaning of a completion and
cannot be given is refused. The JSON schema of an answer is written into the system message, and not enforced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .request import MODEL, AgentRequest, Completion, RefusedRequestError, function_tool, read_fields

_READ = ("max_completion_tokens", "max_tokens", "messages", "response_format", "stop", "stream", "tools")
_REFUSED = {
    "n": (1, "each request gets one completion: send n requests"),
    "logprobs": (False, "log-probabilities are not returned: leave it out"),
    "top_logprobs": (0, "log-probabilities are not returned: leave it out"),
    "modalities": (["text"], "only text is generated: leave it out"),
    "audio": (None, "only text is generated: leave it out"),
    **dict.fromkeys(("functions", "function_call"), (None, "give the functions as tools")),
}
KEY_HEADER = ("authorization", "Bearer ")
VARIABLES = {"OPENAI_MODEL": "model", "OPENAI_API_KEY": "api_key"}
VARIABLES |= {"OPENAI_BASE_URL": "base_url", "OPENAI_API_BASE": "base_url"}


def parse(body: bytes) -> AgentRequest:
    """Return the request in a body of `POST /v1/chat/completions`. Raises `RefusedRequestError` for an invalid one."""
    data, ignored = read_fields(body, _READ, _REFUSED)
    messages, tools, form = (data.get(name) for name in ("messages", "tools", "response_format"))
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = form.get("json_schema") or {}
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        is_function = isinstance(tool, dict) and tool.get("type") == "function"  # with a name, or it is refused:
        function_tool(tool.get("function") if is_function else None, f"tools[{index}]", "parameters")
    limits = [data[name] for name in ("max_completion_tokens", "max_tokens") if name in data]
    data["limit"] = min(limits, default=None, key=lambda value: value if type(value) is int else 0)
    data["stop"] = [data["stop"]] if isinstance(data.get("stop"), str) else data.get("stop", [])
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("name") and message.get("role") != "tool":  # of who speaks
            ignored.add("messages.name")
    schema = ignored.schema("response_format", {"format": form})
    return AgentRequest.of(data, ignored, messages, tools, "stop", "limit", schema=schema)


def error(refusal: RefusedRequestError) -> dict[str, Any]:
    message, kind = str(refusal), "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": refusal.parameter, "code": refusal.code}}


def events(written: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a response as events: its role, its text, its tool calls, its end."""
    (choice,) = written["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": message["content"]}] if message["content"] else []
    deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(message.get("tool_calls", ()))]
    common = {"id": written["id"], "created": 0, "model": MODEL, "object": "chat.completion.chunk"}
    for delta, end in [*((delta, None) for delta in deltas), ({}, choice["finish_reason"])]:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}]
        yield {**common, "choices": choices, "usage": written["usage"] if end else None}
    yield "[DONE]"


def answer(completion: Completion, request: AgentRequest) -> dict[str, Any]:
    response = completion.response
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, _, arguments in completion.calls()
    ]
    message = {"role": "assistant", "content": response.content or (None if calls else "")}
    message |= {"tool_calls": calls} if calls else {}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": response.finish_reason}
    about = {"id": f"chatcmpl-{completion.number}", "object": "chat.completion", "created": 0, "model": MODEL}
    usage = completion.usage("prompt_tokens", "completion_tokens", "total_tokens")
    return {**about, "choices": [choice], "usage": usage}


ROUTES = {"POST /v1/chat/completions": parse}
