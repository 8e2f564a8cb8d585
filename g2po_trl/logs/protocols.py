"""Requests and responses in logs, in any of the protocols.

Blocks and items become messages as in live requests, by `agents.dialects`. But a log cannot be changed
any more, so parts of unknown kinds are skipped and counted instead of refused. To add a protocol, add a row to
`REQUESTS` and one to `RESPONSES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..agents.dialects import messages as anthropic
from ..agents.dialects import responses as openai_responses
from ..agents.dialects.request import LeftOut
from ..prompts.conversation import IMAGE_PARTS, ROLES, SHOW_IMAGES, TEXT_PARTS, Message, normalize_messages
from ..utils.json import to_json
from ..utils.show import show

Tools = Sequence[Mapping[str, Any]] | None
_BLOCKS = ("tool_use", "tool_result", *anthropic.LEFT_OUT)  # kinds of content that only Anthropic's protocol has
LONGEST_KIND = 60  # characters
_CONVERSATIONS = ("messages", "traj")  # the latter is tau-bench's


class Skipped(LeftOut):
    """Skipped parts of a log: kind -> number of times."""

    def unknown(self, name: str, why: str, parameter: str) -> None:
        """Skip a part of an unknown kind."""
        self.add(name[:LONGEST_KIND])

    def image(self, url: Any, part: Any, where: str, name: str, parameter: str) -> list[dict[str, Any]]:
        """Return an image as a part of the content; for one that cannot be read, such as an address, a text mark."""
        shown = to_json(url or {**part, "cache_control": None}, sort_keys=True)  # marks of caches move
        mark = hashlib.blake2b(shown.encode(), digest_size=8).hexdigest()
        unread = [{"type": "text", "text": f"[image {mark}]"}]  # states that show different ones are not equal
        return super().image(url, part, where, name, parameter) or unread


@dataclass(frozen=True)
class Request:
    """A request to a model: normalized messages, of which the first `instructions` belong to this request only."""

    messages: list[Message]
    tools: Tools = None
    instructions: int = 0


@dataclass(frozen=True)
class RequestForm:
    """A protocol's requests.

    Args:
        fields: names of the fields that are read.
        fits: whether the fields of a line, or of a call, have this form.
        messages: returns the messages in these fields; kinds that are left out are counted.
        instructions: number of messages at the beginning that a later request does not continue.
    """

    fields: tuple[str, ...]
    fits: Callable[[Mapping[str, Any]], bool]
    messages: Callable[[Mapping[str, Any], Skipped], Any]
    instructions: Callable[[Mapping[str, Any]], int] = lambda data: 0


def _items(data: Mapping[str, Any], skipped: Skipped) -> list[Message]:
    items = data["items"] if "items" in data else data.get("input")
    messages = openai_responses.read_items(items, skipped)
    return [*openai_responses.read_instructions(data), *messages]


def _are_blocks(messages: Any) -> bool:
    messages = messages if isinstance(messages, (list, tuple)) else ()
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    blocks = [block for content in contents if isinstance(content, (list, tuple)) for block in content]
    return any(isinstance(one, Mapping) and (one.get("type") in _BLOCKS or "source" in one) for one in blocks)


def _blocks(data: Mapping[str, Any], skipped: Skipped) -> list[Message]:
    return anthropic.read_messages({**data, "messages": _conversation(data)}, skipped)


def _chat(data: Mapping[str, Any], skipped: Skipped) -> Any:
    messages = _conversation(data)
    return [_known(one, skipped) for one in messages] if isinstance(messages, (list, tuple)) else messages


def _conversation(data: Mapping[str, Any]) -> Any:
    return next((data[name] for name in _CONVERSATIONS if name in data), None)


def _known(message: Any, skipped: Skipped) -> Any:
    """Return a message of chat completions without parts of unknown kinds."""
    if not isinstance(message, Mapping):
        return message
    if message.get("function_call") is not None:
        skipped.add("messages.function_call")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        shows_images = message.get("role") in SHOW_IMAGES
        content = [known for part in content for known in _known_part(part, shows_images, skipped)]
    return {**message, "content": content, "function_call": None}


def _known_part(part: Any, shows_images: bool, skipped: Skipped) -> list[Any]:
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    if kind in TEXT_PARTS:
        return [part]
    if kind in IMAGE_PARTS and shows_images:
        image = part.get("image_url", part.get("image"))
        url = image.get("url") if isinstance(image, Mapping) else image
        return skipped.image(url, part, "content", f"messages.{kind}", "messages")
    skipped.add(f"messages.{kind}")
    return []


REQUESTS = {
    "OpenAI's Responses": RequestForm(
        ("input", "items", "instructions", "previous_response_id"),
        lambda data: bool(data.keys() & {"input", "items"}),
        _items,
        lambda data: len(openai_responses.read_instructions(data)),
    ),
    "Anthropic's Messages": RequestForm(
        (*_CONVERSATIONS, "system"),
        lambda data: "system" in data or _are_blocks(_conversation(data)),
        _blocks,
    ),
    "OpenAI's chat completions": RequestForm(_CONVERSATIONS, lambda data: _conversation(data) is not None, _chat),
}
REQUEST_FIELDS = frozenset(name for form in REQUESTS.values() for name in form.fields)


def read_request(data: Mapping[str, Any], skipped: Skipped) -> Request:
    """Return the request in the fields of a line or a call. Raises `ValueError` for malformed ones."""
    form = next((form for form in REQUESTS.values() if form.fits(data)), REQUESTS["OpenAI's chat completions"])
    messages = _of_known_roles(form.messages(data, skipped), skipped)
    return Request(normalize_messages(messages), _read_tools(data.get("tools"), skipped), form.instructions(data))


def _read_tools(tools: Tools, skipped: Skipped) -> Tools:
    """Return tools as chat templates take them, by their own form, which may differ from that of the messages."""
    if any("input_schema" in tool for tool in tools or ()):
        return anthropic.read_tools(tools, skipped)
    if any("type" in tool and not {"function", "custom"} & tool.keys() for tool in tools or ()):
        return openai_responses.read_tools(tools, skipped)[0]
    return tools


def _of_known_roles(messages: Any, skipped: Skipped) -> Any:
    if not isinstance(messages, (list, tuple)):
        return messages
    roles = [one.get("role") if isinstance(one, Mapping) else None for one in messages]
    unknown = [isinstance(role, str) and role not in ROLES for role in roles]
    skipped.update(f"messages of role {role}" for role, is_unknown in zip(roles, unknown) if is_unknown)
    return [one for one, is_unknown in zip(messages, unknown) if not is_unknown]


@dataclass(frozen=True)
class Response:
    """The response of a model.

    Args:
        message: the assistant message, normalized.
        is_cut: whether it reached its maximum length.
        id: id by which a later request of OpenAI's Responses may continue it.
    """

    message: Message
    is_cut: bool = False
    id: str | None = None


def _completion(body: Mapping[str, Any], where: str, skipped: Skipped) -> tuple[Any, bool]:
    choices = body["choices"]
    if not isinstance(choices, (list, tuple)) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise ValueError(f"{where}.choices is {show(choices)}; give the one choice that the agent used")
    return _known(choices[0].get("message"), skipped), choices[0].get("finish_reason") == "length"


def _output(body: Mapping[str, Any], where: str, skipped: Skipped) -> tuple[Any, bool]:
    output, is_cut = body["output"], body.get("status") == "incomplete"
    if isinstance(output, str) or (isinstance(output, Mapping) and "output" not in output):
        answer = read_response(output, f"{where}.output", skipped)
        return answer.message, is_cut or answer.is_cut
    answers = [one for one in openai_responses.read_items(output, skipped) if one["role"] == "assistant"]
    return answers[-1] if answers else {"content": ""}, is_cut


def _message(body: Mapping[str, Any], where: str, skipped: Skipped) -> tuple[Any, bool]:
    answer = {**body, "role": body.get("role", "assistant")}
    if _are_blocks([body]) or body.get("type") == "message":
        (answer,) = anthropic.read_messages({"messages": [answer]}, skipped)[-1:]
    return _known(answer, skipped), body.get("stop_reason") == "max_tokens"


# Field of a response -> its reader, which returns the assistant's message and whether it was cut. The first that fits.
RESPONSES = {"choices": _completion, "output": _output, "content": _message, "tool_calls": _message}


def read_response(response: Any, where: str, skipped: Skipped) -> Response:
    """Return a response: its text, the assistant's message, or the body of any of the protocols.

    Raises `ValueError` for anything else; the message begins with `where`.
    """
    body = {"content": response} if isinstance(response, str) else response
    read = next((RESPONSES[name] for name in RESPONSES if isinstance(body, Mapping) and name in body), None)
    message, is_cut = read(body, where, skipped) if read else (None, False)
    if not isinstance(message, Mapping) or message.get("role", "assistant") != "assistant":
        raise ValueError(f"{where} is {show(response)}; give the assistant's message, or the whole response")
    try:
        (message,) = normalize_messages([{**message, "role": "assistant"}])
    except ValueError as error:
        raise ValueError(str(error).replace("messages[0]", where, 1)) from error
    return Response(message, is_cut, str(body["id"]) if "output" in body and body.get("id") else None)
