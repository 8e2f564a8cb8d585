"""OpenAI's Responses.

A request's items become messages: consecutive items of the model are one message, as it wrote them. Items and tools
that a chat template cannot express (reasoning, tools that OpenAI runs) are left out and named in `ignored`.
Functions in a namespace are offered as `namespace.name`, custom tools as functions of one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...prompts.conversation import Message
from ...utils.show import show
from .chat_completions import KEY_HEADER, VARIABLES, error  # noqa: F401
from .request import CHAT_FIELDS, MODEL, AgentRequest, Completion, LeftOut, demand, function_tool, read_fields

_READ = ("input", "instructions", "max_output_tokens", "previous_response_id", "stream", "text", "tools")
_REFUSED = {
    "conversation": (None, "send the items, or previous_response_id"),
    "top_logprobs": (0, "log-probabilities are not returned: leave it out"),
    "prompt": (None, "send its text as instructions"),
    "background": (False, "leave it out, and wait for the response"),
}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}  # of a custom tool
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_CALL_ITEMS = {"function": "function_call", "custom": "custom_tool_call"}
_ALWAYS = {"object": "response", "created_at": 0, "error": None, "model": MODEL}
_ALWAYS |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
_DETAILS = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
_DETAILS |= {"output_tokens_details": {"reasoning_tokens": 0}}
_LEFT_OUT = ("reasoning", "compaction", "web_search_call", "tool_search_call", "tool_search_output")


def parse(body: bytes) -> AgentRequest:
    """Return the request in a body of `POST /v1/responses`. Raises `RefusedRequestError` for an invalid one."""
    data, ignored = read_fields(body, _READ, _REFUSED)
    instructions, (tools, items) = read_instructions(data), read_tools(data.get("tools", []), ignored)
    messages = [*instructions, *read_items(data.get("input"), ignored)]
    schema, names = ignored.schema("text", data.get("text", {})), ("", "max_output_tokens")  # no stops
    continued = {"after": data.get("previous_response_id"), "instructions": len(instructions)}
    return AgentRequest.of(data, ignored, messages, tools, *names, schema=schema, fields={"items": items}, **continued)


def read_tools(tools: Any, ignored: LeftOut, namespace: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the functions among tools as chat templates take them, and name -> fields of an item that calls it."""
    functions, items = [], {}
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            inner = read_tools(tool.get("tools", []), ignored, str(tool.get("name")))
            functions, items = functions + inner[0], items | inner[1]
        elif isinstance(kind, str) and kind not in _CALL_ITEMS:
            ignored.add(f"tools.{kind}")
        else:
            tool = {**tool, "parameters": _INPUT} if kind == "custom" else tool if isinstance(kind, str) else None
            function = function_tool(tool, f"tools[{index}]", "parameters", f"{namespace}." if namespace else "")
            functions.append(function)
            item = {"type": _CALL_ITEMS[kind], "name": tool["name"]}
            items[function["function"]["name"]] = {**item, "namespace": namespace} if namespace else item
    return functions, items


def read_instructions(data: Mapping[str, Any]) -> list[Message]:
    """Return the message of a request's instructions, if it has any."""
    return [{"role": "system", "content": data["instructions"]}] if data.get("instructions") else []


def read_items(items: Any, ignored: LeftOut) -> list[Message]:
    """Return the messages that items are."""
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    demand(isinstance(items, list), "input", items, "give a text or a list of items")
    messages: list[Message] = []
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", (item.get("type") or "message") if isinstance(item, dict) else None
        if kind in _LEFT_OUT:
            ignored.add(f"input.{kind}")
        elif kind == "message":
            role, kept = item.get("role"), {name: item[name] for name in CHAT_FIELDS if item.get(name)}
            content = _content(item.get("content"), where)
            if role == "assistant":
                own = _own(messages)
                own |= {**kept, "content": own["content"] + content}
            else:
                messages.append({"role": role, "content": content, **kept})
        elif isinstance(kind, str) and kind in _CALLS:
            demand(isinstance(item.get("name"), str), where, item, "give the call's name")
            name = f"{item['namespace']}.{item['name']}" if item.get("namespace") else item["name"]
            arguments = item.get(_CALLS[kind])
            function = {"name": name, "arguments": {"input": arguments} if kind == "custom_tool_call" else arguments}
            _own(messages).setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            ignored.unknown(where, kind, f"{where} is {show(item)}: send messages, function calls and outputs")
    return messages


def _own(messages: list[Message]) -> Message:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _content(content: Any, where: str) -> list[Any]:
    demand(isinstance(content, (str, list, type(None))), where, content, "give a text as content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def events(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a response as events: each item added, its text or arguments, and done."""
    for number, event in enumerate(_events(written)):
        yield {**event, "sequence_number": number}


def _events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    started = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        field = _CALLS.get(item["type"], "content")
        empty = [] if field == "content" else ""
        begun = {**item, "status": "in_progress", field: empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if field == "content":
            (part,) = item["content"]
            at["content_index"] = 0
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        else:
            name = f"response.{item['type']}_{field}"
            yield {"type": f"{name}.delta", **at, "delta": item[field]}
            yield {"type": f"{name}.done", **at, field: item[field], "name": item["name"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def answer(completion: Completion, request: AgentRequest) -> dict[str, Any]:
    response, output, done = completion.response, [], {"status": "completed"}
    if response.content or not response.tool_calls:
        text = {"type": "output_text", "text": response.content, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{completion.number}", "type": "message", "role": "assistant"}
        output.append({**item, "content": [text], **done})
    for id_, name, arguments, text in completion.calls():
        item = {"id": f"fc_{id_}", "call_id": id_, **done}
        item |= request.fields["items"].get(name, {"type": "function_call", "name": name})
        if item["type"] == "custom_tool_call":
            text = arguments["input"] if isinstance(arguments.get("input"), str) else text
        output.append({**item, _CALLS[item["type"]]: text})
    ended = {"status": "completed", "incomplete_details": None}
    if response.finish_reason == "length":
        ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    usage = completion.usage("input_tokens", "output_tokens", "total_tokens") | _DETAILS
    return _ALWAYS | {"id": f"resp_{completion.number}", **ended, "output": output, "usage": usage}


ROUTES = {"POST /v1/responses": parse}
