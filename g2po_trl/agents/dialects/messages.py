"""Anthropic's Messages.

Blocks become messages: the model's texts and calls one message, each tool result one, texts between them the user's.
What a chat template cannot express (thinking, marks of caches, tools that Anthropic runs) is left out and named in
`ignored`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...prompts.conversation import SHOW_IMAGES, Message
from ...utils.show import show
from .request import (
    CHAT_FIELDS,
    MODEL,
    AgentRequest,
    Blocks,
    Completion,
    LeftOut,
    RefusedRequestError,
    answer_schema,
    arguments_text,
    chat_request,
    demand,
    function_tool,
    named_events,
    read_fields,
)

_READ = ("max_tokens", "messages", "output_config", "stop_sequences", "stream", "system")
_READ += ("thread", "tool_choice", "tools")
_NEUTRAL = {"model": (MODEL,)}
_REFUSED = {"compaction": (None, "shorten the messages")}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
LEFT_OUT = ("thinking", "redacted_thinking", "server_tool_use", "web_search_tool_result", "container_upload")
_CHARACTERS_PER_TOKEN = 4  # roughly, for `count_tokens`: a worker has no tokenizer
KEY_HEADER = ("x-api-key", "")
VARIABLES = {
    "ANTHROPIC_MODEL": "model",
    "ANTHROPIC_SMALL_FAST_MODEL": "model",
    "ANTHROPIC_BASE_URL": "anthropic_url",
    "ANTHROPIC_API_KEY": "api_key",
}


def _data_url(block: Mapping[str, Any]) -> str | None:
    """Return the data URL of an image that a request contains itself."""
    source = block.get("source")
    is_whole = isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str)
    return f"data:{source.get('media_type')};base64,{source['data']}" if is_whole else None


_BLOCKS = Blocks("messages", {"text": "text"}, "image", _data_url)


def parse(body: bytes, headers: Mapping[str, str]) -> AgentRequest:
    """Return the request in a body of `POST /v1/messages`. Raises `RefusedRequestError` for an invalid one."""
    data, ignored = read_fields(body, _READ, _NEUTRAL, _REFUSED)
    messages = read_messages(data, ignored)
    if messages and messages[-1]["role"] == "assistant":  # answered by a message of its own
        ignored.add("messages.prefill")
    choice, only = data.get("tool_choice", {}), False
    if isinstance(choice, dict):
        choice, only = choice.get("type"), choice.get("disable_parallel_tool_use")
    if choice not in (None, "auto", "none") or only:  # neither a call nor a single one can be promised
        ignored.add("tool_choice")
    config = data.get("output_config", {})
    form = config.get("format") if isinstance(config, dict) else None
    if config not in ({}, {"format": form}):
        ignored.add("output_config")
    schema, after = answer_schema("output_config.format", form), _after(data.get("thread"))
    chat = chat_request(
        schema if after is None else None,  # a thread keeps the system message, which asks for it
        messages=messages,
        tools=None if choice == "none" else read_tools(data.get("tools", []), ignored),
        stop=data.get("stop_sequences", []),
        max_tokens=data.get("max_tokens"),
    )
    return AgentRequest(chat, tuple(sorted(ignored)), bool(data.get("stream")), after=after, keeps_tools=True)


def _after(thread: Any) -> Any:
    """Return the id of the response that a request continues, without its messages, system message and tools."""
    kind = "create" if thread is None else thread.get("type") if isinstance(thread, dict) else None
    demand(kind in ("create", "continue"), "thread", thread, "give the type create or continue")
    return thread.get("previous_message_id", "") if kind == "continue" else None


def read_messages(data: Mapping[str, Any], ignored: LeftOut) -> list[Message]:
    """Return the messages that a request's `system` and `messages` are."""
    messages: list[Message] = []
    if data.get("system"):
        messages.append({"role": "system", "content": _BLOCKS.read(data["system"], "system", ignored)})
    given = data.get("messages")
    demand(isinstance(given, list), "messages", given, "give a list of messages")
    for index, message in enumerate(given):
        messages += _messages(message, f"messages[{index}]", ignored)
    return messages


def _messages(message: Any, where: str, ignored: LeftOut) -> Iterator[Message]:
    """Yield the messages of templates that one message consists of."""
    message = message if isinstance(message, dict) else {}
    role, content = message.get("role"), message.get("content")
    kept = {name: message[name] for name in CHAT_FIELDS if name in message}
    if not isinstance(content, list):
        yield {"role": role, "content": content, **kept}
        return
    calls, texts = [], []
    for index, block in enumerate(content):
        at = f"{where}: content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" or kind == "image" and role in SHOW_IMAGES:
            texts.append((at, block))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            if texts:
                yield {"role": role, "content": _BLOCKS.joined(texts, ignored, role in SHOW_IMAGES)}
                texts = []
            ignored.update(["messages.tool_result.is_error"] if block.get("is_error") else [])
            result = _BLOCKS.read(block.get("content"), at, ignored, shows_images=True)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind in LEFT_OUT:
            ignored.add(f"messages.{kind}")
        else:
            why = f"{at} is {show(kind)}: only text, images of users, tool_use and tool_result are supported"
            ignored.unknown(f"messages.{kind}", why, "messages")
    if texts or calls or not any(isinstance(one, dict) and one.get("type") == "tool_result" for one in content):
        own = {"tool_calls": calls} if calls else {}
        yield {"role": role, "content": _BLOCKS.joined(texts, ignored, role in SHOW_IMAGES), **kept, **own}


def read_tools(tools: Any, ignored: LeftOut) -> list[dict[str, Any]]:
    """Return the functions among tools as chat templates take them."""
    functions = []
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        if isinstance(tool, dict) and tool.get("type", "custom") != "custom" and "input_schema" not in tool:
            ignored.add(f"tools.{tool['type']}")
            continue
        is_named = isinstance(tool, dict) and isinstance(tool.get("name"), str)
        demand(is_named, f"tools[{index}]", tool, "give a tool with a name")
        functions.append(function_tool(tool["name"], tool.get("description"), tool.get("input_schema")))
    return functions


def count_tokens(body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer to `POST /v1/messages/count_tokens`: a rough number, by characters."""
    chat = parse(body, headers).chat
    characters = len(str(chat.messages)) + len(str(chat.tools or ""))
    return {"input_tokens": characters // _CHARACTERS_PER_TOKEN}


def stream(written: Mapping[str, Any], request: AgentRequest) -> bytes:
    """Return a response as server-sent events: its blocks, each with its beginning, content and end."""
    begun = {"content": [], "stop_reason": None, "usage": {**written["usage"], "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**written, **begun}}]
    for index, block in enumerate(written["content"]):
        if block["type"] == "text":
            start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": arguments_text(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": start},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {"stop_reason": written["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": end, "usage": written["usage"]}, {"type": "message_stop"}]
    return named_events(events)


def error(refusal: RefusedRequestError) -> dict[str, Any]:
    kind = _ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}, "request_id": None}


def answer(completion: Completion, request: AgentRequest) -> dict[str, Any]:
    response = completion.response
    content: list[dict[str, Any]] = []
    if response.content or not response.tool_calls:
        content.append({"type": "text", "text": response.content})
    for number, name, arguments in completion.calls():
        # A text is what the model wrote instead of an object, and the protocol has objects alone.
        arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        content.append({"type": "tool_use", "id": f"call_{number}", "name": name, "input": arguments})
    return {
        "id": f"msg_{completion.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": _STOP_REASONS.get(response.finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": response.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": response.completion_tokens,
        },
    }


ROUTES = {"POST /v1/messages": parse, "POST /v1/messages/count_tokens": count_tokens}
