"""The messages of a model call in its span, by the conventions of libraries.

To add a convention, add a row to `READERS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Event = tuple[str, dict[str, Any]]  # its name and fields
Call = dict[str, Any]  # as a line of a log has it
Reader = Callable[[Mapping[str, Any], Sequence[Event]], Call | None]  # of a span's attributes and events
_MESSAGE_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_CUT = ("length", "max_tokens", "max_output_tokens")
_WRAPPERS = ("message", "tool_call", "message_content", "tool")


def call_of(attributes: Mapping[str, Any], events: Sequence[Event]) -> Call | None:
    """Return a span's call in the form of a log line, or `None` if it has no readable messages."""
    call = next((call for read in READERS if (call := read(attributes, events)) is not None), None)
    if call is None or not any(message.get("content") for message in call["messages"]):  # contents were not captured
        return None
    reasons = read_json(attributes.get("gen_ai.response.finish_reasons"))
    if _is_cut(reasons[0] if isinstance(reasons, list) and reasons else reasons):
        call["response"]["stop_reason"] = "max_tokens"
    return call


def _is_cut(reason: Any) -> bool:
    return isinstance(reason, str) and reason in _CUT


def _parts(attributes: Mapping[str, Any], events: Sequence[Event]) -> Call | None:
    """Read messages that consist of parts, in attributes or in an event with the details of the call."""
    for _, fields in events:
        attributes = {**attributes, **{name: value for name, value in fields.items() if name.startswith("gen_ai.")}}
    asked, answered = (read_json(attributes.get(f"gen_ai.{side}.messages")) for side in ("input", "output"))
    if not _are_objects(asked) or not _are_objects(answered):
        return None
    tools = read_json(attributes.get("gen_ai.tool.definitions"))
    system = read_json(attributes.get("gen_ai.system_instructions"))
    system = [_block(part) for part in system] if isinstance(system, list) else system
    cut = {"stop_reason": "max_tokens"} if _is_cut(answered[0].get("finish_reason")) else {}
    if not any("parts" in message for message in [*asked, *answered]):  # as some libraries write chat completions
        first = [{"role": "system", "content": system}] if system else []
        response = {"content": None, **answered[0], **cut}
        return {"messages": [*first, *asked], "response": response, "tools": _functions(tools)}
    several = attributes.get("gen_ai.request.choice.count") not in (None, 1)
    content = [block for one in (answered[:1] if several else answered) for block in _blocks(one)]
    return {
        "system": system,
        "messages": [{"role": one.get("role"), "content": _blocks(one)} for one in asked],
        "response": {"type": "message", "role": "assistant", "content": content, **cut},
        "tools": _functions(tools, blocks=True),
    }


def _blocks(message: Mapping[str, Any]) -> list[Any]:
    parts = message.get("parts")
    return [_block(part) for part in parts] if isinstance(parts, list) else [_block({**message, "type": "text"})]


def _block(part: Any) -> Any:
    """Return a part as a block of Anthropic's Messages, which have a kind for each supported part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": _text(part.get("content"))}
    if kind == "tool_call":
        return {"type": "tool_use", "id": part.get("id"), "name": part.get("name"), "input": part.get("arguments")}
    if kind == "tool_call_response":
        result = part.get("response", part.get("result"))
        return {"type": "tool_result", "tool_use_id": part.get("id"), "content": _text(result)}
    return part


def _events(attributes: Mapping[str, Any], events: Sequence[Event]) -> Call | None:
    """Read one event per message, and one for the choice (conventions up to 1.36)."""
    messages, response = [], None
    for name, fields in events:
        written = read_json(fields.get("gen_ai.event.content"))
        fields = {**fields, **written} if isinstance(written, Mapping) else fields
        if match := _MESSAGE_EVENT.fullmatch(name):
            named = {"role": match[1], "tool_call_id": fields.get("id") if match[1] == "tool" else None}
            messages.append({**named, **_chat_message(fields)})
        elif name == "gen_ai.choice" and response is None:
            message = read_json(fields.get("message"))
            whole = (
                message if isinstance(message, Mapping) else {**fields, "content": message or fields.get("content")}
            )
            response = _chat_message(whole) | ({"stop_reason": "max_tokens"} if _cut_in(fields) else {})
    return {"messages": messages, "response": response} if messages and response else None


def _cut_in(fields: Mapping[str, Any]) -> bool:
    return _is_cut(fields.get("finish_reason"))


def _texts(attributes: Mapping[str, Any], events: Sequence[Event]) -> Call | None:
    """Read messages as JSON in `gen_ai.prompt` and `gen_ai.completion` (conventions of 1.27)."""
    for _, fields in events:
        attributes = {**attributes, **fields}
    asked, answered = (read_json(attributes.get(f"gen_ai.{side}")) for side in ("prompt", "completion"))
    if not _are_objects(asked) or not _are_objects(answered):
        return None
    return {"messages": [_chat_message(one) for one in asked], "response": _chat_message(answered[0])}


def _flat(asked: str, answered: str, tools: str) -> Reader:
    """Return a reader of messages that are spread over many attributes, such as `gen_ai.prompt.0.role`."""

    def read(attributes: Mapping[str, Any], events: Sequence[Event]) -> Call | None:
        messages, answers = (_nested(attributes, prefix) for prefix in (asked, answered))
        if not _are_objects(messages) or not _are_objects(answers):
            return None
        response = _chat_message(answers[0]) | ({"stop_reason": "max_tokens"} if _cut_in(answers[0]) else {})
        schemas = _nested(attributes, tools)
        schemas = [one.get("json_schema", one) for one in schemas] if _are_objects(schemas) else []
        functions = _functions([read_json(schema) for schema in schemas])
        return {"messages": [_chat_message(one) for one in messages], "response": response, "tools": functions}

    return read


READERS: tuple[Reader, ...] = (  # the first one's answer that is not None
    _parts,
    _events,
    _texts,
    _flat("gen_ai.prompt", "gen_ai.completion", "llm.request.functions"),  # OpenLLMetry
    _flat("llm.input_messages", "llm.output_messages", "llm.tools"),  # OpenInference
)


def _nested(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return the attributes below a prefix as lists and objects: `prefix.0.role` becomes a list of objects."""
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith(f"{prefix}."):
            *path, last = name.removeprefix(f"{prefix}.").split(".")
            place = tree
            for word in path:
                inner = place.get(word)
                place[word] = place = inner if isinstance(inner, dict) else {}
            place[last] = value
    return _lists(tree)


def _lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1 and (word := next(iter(tree))) in _WRAPPERS and isinstance(tree[word], dict):
        return _lists(tree[word])
    if tree and all(name.isdecimal() for name in tree):
        return [_lists(tree[name]) for name in sorted(tree, key=int)]
    return {name: _lists(value) for name, value in tree.items()}


def _chat_message(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of chat completions from fields that may be JSON texts."""
    message = {name: fields[name] for name in ("role", "tool_call_id") if fields.get(name) is not None}
    content = fields.get("content", fields.get("contents"))
    parts = read_json(content)
    message["content"] = parts if _are_objects(parts) and all("type" in one for one in parts) else _text(content)
    calls = read_json(fields.get("tool_calls"))
    return {**message, "tool_calls": calls} if isinstance(calls, list) and calls else message


def _functions(tools: Any, blocks: bool = False) -> list[dict[str, Any]]:
    """Return definitions of tools as in chat completions, or as in Anthropic's Messages for `blocks`."""
    found = []
    for tool in tools if isinstance(tools, list) else ():
        tool = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            continue
        function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        parameters = read_json(tool.get("parameters", tool.get("input_schema"))) or {}
        function["input_schema" if blocks else "parameters"] = parameters
        found.append(function if blocks else {"type": "function", "function": function})
    return found


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def read_json(value: Any) -> Any:
    """Return the list or object in a JSON text; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
