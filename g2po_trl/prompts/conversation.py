"""Chat requests: the messages, tools and stops of one call of a model, and the response to it.

Messages are plain data in the form that chat templates take: `role`, `content` (a string), for an assistant
`tool_calls`, for a tool `name` and `tool_call_id`. Arguments of tool calls are objects, not JSON text. A message with
images has them as `images`, and in its content a `PLACE` at the place of each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..utils.errors import G2POError
from ..utils.images import PLACE, Picture, as_picture
from ..utils.json import to_json
from ..utils.options import check_value, hints_of
from ..utils.show import show

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Kinds of content that are read, as OpenAI, Anthropic and TRL write them; of a text, the name of its field.
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text", "summary_text"), "text") | {"refusal": "refusal"}
IMAGE_PARTS = ("image", "image_url", "input_image")
SHOW_IMAGES = ("user", "tool")  # roles whose messages may have images
MAX_DEPTH = 100  # of lists and objects in messages and tools: the code that handles them is recursive


@dataclass(frozen=True)
class ChatRequest:
    """One call of a chat model. Constructing one validates it and brings it into one form.

    Args:
        messages: the conversation so far, oldest first; see `normalize_messages`.
        tools: JSON schemas of the functions that may be called, as chat templates take them. `None`: none.
        stop: the completion ends before the first of these texts.
        max_tokens: maximum tokens of the completion, below the trainer's. `None`: the trainer's.
        shorten: the oldest turns may be left out if the prompt is too long. `False`: a prompt that is too long ends
            the episode.
        task: number of messages at the beginning that are not left out; at least those before the assistant's first.
        needs_answer: a completion without text and calls is invalid. `False`: it is valid.

    Raises:
        G2POError: for a field of the wrong type; the message names it.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    shorten: bool = False
    task: int = 0
    needs_answer: bool = False

    def __post_init__(self) -> None:
        tools, stop = self.tools, self.stop
        are_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        are_texts = isinstance(stop, (list, tuple)) and all(isinstance(text, str) and text for text in stop)
        _need(tools is None or are_objects, "tools", tools, "a list of JSON schemas")
        _need(are_texts, "stop", stop, "a list of strings")
        intervals = {"max_tokens": "[1, inf)", "task": "[0, inf)", "shorten": None, "needs_answer": None}
        for name, within in intervals.items():
            check_value(name, getattr(self, name), hints_of(ChatRequest)[name], {"within": within})
        vars(self).update(
            messages=normalize_messages(self.messages),
            tools=plain(tools, "tools") if tools else None,
            stop=tuple(_text(text, "stop") for text in stop),
        )

    def call_in(self, answer: Message, text: str, valid: bool) -> str | None:
        """Return how a completion, well-formed or not, used the tools; see `Step.call`."""
        if not self.tools:
            return None
        known = {tool.get("function", tool).get("name") for tool in self.tools}
        called = {call["function"]["name"] for call in answer.get("tool_calls", ())}
        if not valid and (called or text.strip()):
            return "unreadable"
        return "none" if not called else "known" if called <= known else "unknown"

    def is_valid(self, answer: Message) -> bool:
        """Return whether an answer has objects as arguments of its calls, and text or calls if it needs any."""
        calls = answer.get("tool_calls", ())
        says_something = bool(calls or answer["content"].strip() or not self.needs_answer)
        return says_something and all(isinstance(call["function"]["arguments"], dict) for call in calls)


def _need(valid: bool, where: str, value: Any, wanted: str) -> None:
    """Refuse a value at a place in a request's field unless it is valid."""
    if not valid:
        raise G2POError(f"{where} is {show(value)}; give {wanted}", where.partition("[")[0], value)


def normalize_messages(messages: Any) -> list[Message]:
    """Return chat messages in one form, regardless of the client that wrote them. Raises `G2POError` for other values.

    Missing content becomes "", and a list of text parts their joined text. Image parts (data URLs) become marks in the
    text and `images`. Arguments of calls that are JSON text become objects. A tool's result gets the name of the call
    with its id. Fields that chat templates do not read are left out.
    """
    _need(isinstance(messages, (list, tuple)) and len(messages) > 0, "messages", messages, "a list of chat messages")
    normalized = [_normalize(message, f"messages[{number}]") for number, message in enumerate(messages)]
    names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
    for message in normalized:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return normalized


def _normalize(message: Any, where: str) -> Message:
    _need(isinstance(message, Mapping), where, message, "an object with role and content")
    role, where = message.get("role"), f"{where}: "
    _need(role in ROLES, f"{where}role", role, f"one of {', '.join(ROLES)}")
    content, images = message.get("content"), message.get("images") or ()
    _need(isinstance(images, (list, tuple)), f"{where}images", images, "a list of images")
    if isinstance(content, (list, tuple)):
        content, images = read_parts(content, f"{where}content")
    content = "" if content is None else _text(content, f"{where}content")
    images = [one for one in images if isinstance(one, Picture)]
    are_shown = not images or role in SHOW_IMAGES and content.count(PLACE) == len(images)
    _need(are_shown, f"{where}images", images, "them to users or tools, with a mark for each in the text")
    normalized: Message = {"role": "system" if role == "developer" else role, "content": content}
    normalized |= {"images": images} if images else {}
    texts = {"assistant": ["reasoning_content"], "tool": ["name", "tool_call_id"]}.get(role, ())
    normalized |= {name: _text(message[name], f"{where}{name}") for name in texts if message.get(name)}
    if role == "assistant":
        older, calls = message.get("function_call"), message.get("tool_calls") or []
        _need(older is None, f"{where}function_call", older, "tool_calls, as in the protocol of today")
        _need(isinstance(calls, (list, tuple)), f"{where}tool_calls", calls, "a list")
        made = [_call(call, f"{where}tool_calls[{number}]") for number, call in enumerate(calls)]
        normalized |= {"tool_calls": made} if made else {}
    return normalized


def read_parts(content: Sequence[Any], where: str, opens_files: bool = False) -> tuple[str, list[Picture]]:
    """Return the text of a content's parts, with a `PLACE` for each image, and the images.

    Other parts, and images that cannot be read, are refused (`G2POError`), as are paths unless it `opens_files`.
    """
    text, images, after_text = "", [], False
    has_images = any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content)
    for number, part in enumerate(content):
        at = f"{where}[{number}]"
        _need(isinstance(part, Mapping), at, part, "a part of type text or image")
        kind = part.get("type", "text")
        if kind in IMAGE_PARTS:
            images.append(_image(part, at, opens_files))
            text, after_text = text + PLACE, False
        else:
            new = _text(part.get(TEXT_PARTS.get(str(kind))), at)
            text, after_text = text + "\n" * after_text + (without_places(new) if has_images else new), True
    return text, images


def _image(part: Mapping[str, Any], where: str, opens_files: bool) -> Picture:
    image = next((part[name] for name in ("image_url", "image", "source") if name in part), None)
    if isinstance(image, Mapping):
        data = f"data:{image.get('media_type')};base64,{image.get('data')}"
        image = data if image.get("type") == "base64" else image.get("url")
    is_data = not isinstance(image, str) or isinstance(image, Picture) or image.startswith("data:")
    _need(opens_files or is_data, where, image, "data:image/png;base64,…: no address or file is read")
    return as_picture(image, where)


def without_places(text: str) -> str:
    """Return a text in which no character stands for an image."""
    return text.replace(PLACE, "\N{REPLACEMENT CHARACTER}")


def joined_content(messages: Sequence[Message], between: str) -> Message:
    """Return the content of messages in one, with their images."""
    images = pictures_of(messages)
    shown = [one["content"] if one.get("images") or not images else without_places(one["content"]) for one in messages]
    return {"content": between.join(shown), **({"images": images} if images else {})}


def pictures_of(messages: Iterable[Message]) -> list[Picture]:
    """Return the images of messages, in order."""
    return [image for message in messages for image in message.get("images", ())]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    _need(is_named, where, call, "a function with a name")
    arguments = plain(_read_arguments(function.get("arguments")), where)
    normalized = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return normalized if call.get("id") is None else {"id": _text(call["id"], f"{where}: id"), **normalized}


def _read_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object; other values, as a model may write, are returned unchanged."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    with suppress(ValueError, RecursionError):
        read = json.loads(arguments.strip() or "{}")
        return arguments if _is_deeper(read, MAX_DEPTH) else read
    return arguments


def plain(value: Any, where: str) -> Any:
    """Return a value as plain JSON data without lone surrogates, at most `MAX_DEPTH` levels deep."""
    with suppress(RecursionError):
        read = json.loads(to_json(value))
        if not _is_deeper(read, MAX_DEPTH):
            return read
    raise G2POError(f"{where} is nested more than {MAX_DEPTH} levels deep: flatten it", where.partition("[")[0])


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in more levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(part, (dict, list)) and (not levels or _is_deeper(part, levels - 1)) for part in parts)


def _text(value: Any, where: str) -> str:
    _need(isinstance(value, str), where, value, "a string")
    return value.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be tokenized


def since_last_completion(messages: Sequence[Message]) -> list[Message]:
    """Return the messages after the last one of the assistant: what the agent or its environment added."""
    before = itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages))
    return list(before)[::-1]


def as_text(messages: Sequence[Message]) -> str:
    """Return messages as readable text: one paragraph each, with its role."""
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in messages)


def message_text(message: Message) -> str:
    """Return a message's content and tool calls as readable text."""
    content, calls = message["content"], [call["function"] for call in message.get("tool_calls", ())]
    shown = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    for image in message.get("images", ()):
        content = content.replace(PLACE, f"[image {image}]", 1)
    return "\n".join(filter(None, [content, *shown]))


def prefix_digests(messages: Sequence[Message], tools: Any = None) -> list[bytes]:
    """Return a digest of each prefix of a conversation with these tools, from none to all of its messages.

    Equal digests mean equal messages, except for the ids of tool calls, which clients choose.
    """
    state, digests = hashlib.blake2b(digest_size=16), []
    for part in (tools, *map(without_ids, messages)):
        state.update(canonical(part))
        digests.append(state.digest())
    return digests


def without_ids(message: Message) -> Message:
    """Return a message without ids of calls and without thoughts."""
    kept = {name: part for name, part in message.items() if name not in ("tool_call_id", "reasoning_content")}
    if "tool_calls" in kept:
        functions = [call["function"] for call in kept["tool_calls"]]
        # As clients write it, who send the text of arguments; a model may have written JSON within JSON.
        kept["tool_calls"] = [{**one, "arguments": _read_arguments(one["arguments"])} for one in functions]
    return kept


def canonical(value: Any) -> bytes:
    """Return JSON data as bytes for a digest."""
    return json.dumps(value, sort_keys=True).encode() + b"\0"


@dataclass(frozen=True)
class ChatResponse:
    """The model's answer to a `ChatRequest`, as an environment receives it (`to_action`, `read`).

    Args:
        content: text of the completion, without tool calls.
        tool_calls: calls as in a normalized message.
        finish_reason: "stop", "length" or "tool_calls".
        prompt_tokens, completion_tokens: 0 if unknown.
    """

    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def message(self) -> Message:
        """Return the assistant's message."""
        calls = {"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    def to_action(self) -> str:
        """Return the action that `TextEnvironment.step` receives: the response as a JSON object."""
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        data = {**self.message(), "finish_reason": self.finish_reason, "usage": usage}
        return json.dumps(data, ensure_ascii=False, sort_keys=True)

    @classmethod
    def read(cls, action: str) -> ChatResponse:
        """Return the response that `to_action` wrote. Any other text becomes the content of a response."""
        with suppress(ValueError, RecursionError, TypeError):
            data = json.loads(action)
            if isinstance(data, dict) and "content" in data:
                calls, usage = tuple(data.get("tool_calls", ())), data.get("usage", {})
                return cls(data["content"], calls, data.get("finish_reason", "stop"), **usage)
        return cls(action)


def response_action(message: Message) -> str:
    """Return the action that a step records: the content and tool calls of the assistant's message as JSON."""
    shown = {name: message[name] for name in ("content", "tool_calls") if name in message}
    return json.dumps(shown, ensure_ascii=False, sort_keys=True)
