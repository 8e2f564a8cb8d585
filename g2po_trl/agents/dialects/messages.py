"""Anthropic's Messages.

Blocks become messages: the model's texts and calls one message, each tool result one, texts between them the user's.
What a chat template cannot express (thinking, marks of caches, Anthropic's tools) is left out, and named in `ignored`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...prompts.conversation import Message
from .request import CHAT_FIELDS, MODEL, AgentRequest, Completion, LeftOut, demand, function_tool, read_fields

_READ = ("max_tokens", "messages", "output_config", "stop_sequences", "stream", "system", "thread", "tools")
_REFUSED = {"compaction": (None, "shorten the messages")}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_UNCACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
LEFT_OUT = ("thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload", "compaction")
KEY_HEADER = ("x-api-key", "")
VARIABLES = {"ANTHROPIC_MODEL": "model", "ANTHROPIC_SMALL_FAST_MODEL": "model"}
VARIABLES |= {"ANTHROPIC_BASE_URL": "anthropic_url", "ANTHROPIC_API_KEY": "api_key"}


def parse(body: bytes) -> AgentRequest:
    """Return the request in a body of `POST /v1/messages`. Raises `RefusedRequestError` for an invalid one."""
    data, ignored = read_fields(body, _READ, _REFUSED)
    messages, thread = read_messages(data, ignored), data.get("thread", {"type": "create"})
    if messages and messages[-1]["role"] == "assistant":  # answered by a message of its own
        ignored.add("messages.prefill")
    kind = thread.get("type") if isinstance(thread, dict) else None
    demand(kind in ("create", "continue"), "thread", thread, "give the type create or continue")
    after = thread.get("previous_message_id", "") if kind == "continue" else None
    contents = [one["content"] for one in messages if isinstance(one["content"], list)]
    found = {str(part.get("tool_name")) for content in contents for part in content if isinstance(part, dict)}
    names, tools = ("stop_sequences", "max_tokens"), read_tools(data.get("tools", []), ignored, found)
    schema = ignored.schema("output_config", data.get("output_config", {}))
    return AgentRequest.of(data, ignored, messages, tools, *names, schema=schema, after=after, in_thread=True)


def read_messages(data: Mapping[str, Any], ignored: LeftOut) -> list[Message]:
    """Return the messages that a request's `system` and `messages` are."""
    given = data.get("messages")
    demand(isinstance(given, list), "messages", given, "give a list of messages")
    system = [{"role": "system", "content": data["system"]}] if data.get("system") else []
    return system + [part for message in given for part in _messages(message, ignored)]


def _messages(message: Any, ignored: LeftOut) -> Iterator[Message]:
    """Yield the messages of templates that one message consists of."""
    message = message if isinstance(message, dict) else {}
    role, content = message.get("role"), message.get("content")
    kept = {name: message[name] for name in CHAT_FIELDS if name in message}
    if not isinstance(content, list):
        yield {"role": role, "content": content, **kept}
        return
    calls, parts, has_results = [], [], False
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            if parts:
                yield {"role": role, "content": parts}
            parts, has_results = [], True
            ignored.update(["messages.tool_result.is_error"] if block.get("is_error") else [])
            named = {"tool_call_id": block.get("tool_use_id"), "name": block.get("name")}
            shown = block.get("content")
            for part in shown if isinstance(shown, list) else ():
                if isinstance(part, dict) and part.get("type") == "tool_reference":  # to a tool that was found
                    part |= {"type": "text", "text": part.get("tool_name")}
            yield {"role": "tool", **named, "content": shown}
        elif kind in LEFT_OUT or str(kind).endswith("_tool_result"):  # of a tool that Anthropic runs
            ignored.add(f"messages.{kind}")
        else:
            parts.append(block)
    if parts or calls or not has_results:
        yield {"role": role, "content": parts, **kept, **({"tool_calls": calls} if calls else {})}


def read_tools(tools: Any, ignored: LeftOut, found: Collection[str]) -> list[dict[str, Any]]:
    """Return the functions among tools as chat templates take them; those with `defer_loading` once they are found."""
    functions = []
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        if isinstance(tool, dict) and tool.get("type", "custom") != "custom" and "input_schema" not in tool:
            ignored.add(f"tools.{tool['type']}")
        elif not isinstance(tool, dict) or not tool.get("defer_loading") or tool.get("name") in found:
            functions.append(function_tool(tool, f"tools[{index}]", "input_schema"))
    return functions


def events(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a response as events: its blocks, each with its beginning, content and end."""
    begun = {"content": [], "stop_reason": None, "usage": {**written["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": {**written, **begun}}
    for index, block in enumerate(written["content"]):
        if block["type"] == "text":
            start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        for name, part in (("start", {"content_block": start}), ("delta", {"delta": delta}), ("stop", {})):
            yield {"type": f"content_block_{name}", "index": index, **part}
    end = {"stop_reason": written["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": written["usage"]}
    yield {"type": "message_stop"}


def error(refusal: Any) -> dict[str, Any]:
    kind = _ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}, "request_id": None}


def answer(completion: Completion, request: AgentRequest) -> dict[str, Any]:
    response, content = completion.response, []
    if response.content or not response.tool_calls:
        content.append({"type": "text", "text": response.content})
    for id_, name, arguments, _ in completion.calls():
        content.append({"type": "tool_use", "id": id_, "name": name, "input": arguments})
    about = {"id": f"msg_{completion.number}", "type": "message", "role": "assistant", "model": MODEL}
    end = {"stop_reason": _STOP_REASONS.get(response.finish_reason, "end_turn"), "stop_sequence": None}
    return {**about, "content": content, **end, "usage": completion.usage("input_tokens", "output_tokens") | _UNCACHED}


ROUTES = {
    "POST /v1/messages": parse,
    "POST /v1/messages/count_tokens": lambda body: {"input_tokens": parse(body).rough_tokens},
}
