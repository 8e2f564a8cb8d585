"""Requests and completions in a form that all dialects share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...prompts.conversation import ChatRequest, ChatResponse, Message
from ...utils.errors import G2POError
from ...utils.images import as_picture
from ...utils.options import require
from ...utils.show import show

MODEL = "policy"
# Fields of messages of chat completions, which logs also have in the places of other protocols.
CHAT_FIELDS = ("name", "reasoning_content", "tool_call_id", "tool_calls")
# Fields that clients send for their own records.
RECORDS = ("client_metadata", "include", "metadata", "prompt_cache_key", "prompt_cache_retention")
RECORDS += ("safety_identifier", "service_tier", "store", "stream_options", "user")
_SUPPORTED = ("text is", "text and images are")  # in a content, by whether its role shows images
_ASK_FOR_SCHEMA = "The final answer is a JSON object that matches this JSON schema, and nothing else:\n{schema}"


class RefusedRequestError(ValueError):
    """A request that is answered with an error and is not a step of the episode.

    Args:
        message: what is wrong, and what to do.
        parameter: the field of the request.
        code: machine-readable name of the error.
        status: the HTTP status. Clients retry 408, 409, 429 and those from 500; agents around them also 400 and 403.
    """

    def __init__(self, message: str, parameter: str | None = None, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status


def demand(condition: bool, where: str, value: Any, remedy: str) -> None:
    """Refuse a request unless a condition of the value at this place is met. The field is what precedes its index."""
    if not condition:
        raise RefusedRequestError(f"{where} is {show(value)}: {remedy}", where.partition("[")[0])


class LeftOut(Counter[str]):
    """Parts left out of a request, since a chat template cannot express them: name -> number of times."""

    def add(self, name: str) -> None:
        self[name] += 1

    def unknown(self, name: str, why: str, parameter: str) -> None:
        """Refuse a part of an unknown kind. For logs, a subclass leaves it out instead."""
        raise RefusedRequestError(why, parameter)

    def image(self, url: Any, part: Any, where: str, name: str, parameter: str) -> list[dict[str, Any]]:
        """Return an image as a part of a message's content, by its data URL; nothing if it is left out."""
        try:
            is_whole = isinstance(url, str) and url.startswith("data:")
            require(is_whole, where, part, "no address or file is read: send the image itself in base64")
            return [{"type": "image", "image": as_picture(url, where)}]
        except G2POError as error:
            self.unknown(name, str(error), parameter)
            return []


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent.

    Args:
        chat: what the model is asked.
        ignored: names of fields that the trainer decides otherwise.
        stream: the response is sent as events.
        fields: fields that its dialect needs for the response.
        after: id of the response that the messages continue; the conversation up to it is not among them.
        instructions: number of messages at the beginning that a request after this one does not continue.
        keeps_tools: of the request that `after` answered, instead of its own.
    """

    chat: ChatRequest
    ignored: tuple[str, ...] = ()
    stream: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    after: Any = None
    instructions: int = 0
    keeps_tools: bool = False

    def whole(self, answered: Sequence[tuple[AgentRequest, Completion]]) -> AgentRequest:
        """Return the request with all messages that it continues, from its episode's completions so far.

        Raises `RefusedRequestError` for an id that none of them has.
        """
        if self.after is None:
            return self
        continued = next((pair for pair in answered if self.after in pair[1].names), None)
        if continued is None:
            message = f"{show(self.after)} is not a response of this episode: send the messages"
            raise RefusedRequestError(message, code="not_found")
        earlier, completion = continued
        tools = earlier.chat.tools if self.keeps_tools else self.chat.tools
        messages = list(self.chat.messages)
        before = [*earlier.chat.messages[earlier.instructions :], completion.message()]
        messages[self.instructions : self.instructions] = before
        return replace(self, chat=chat_request(**{**vars(self.chat), "messages": messages, "tools": tools}))


@dataclass(frozen=True)
class Completion:
    """The model's response, the `number`-th of its episode, after `calls_before` tool calls.

    Ids made of these contain neither time nor randomness: a replayed episode gets the same ones.
    """

    response: ChatResponse
    number: int
    calls_before: int

    def calls(self) -> list[tuple[int, str, Any]]:
        """Return the tool calls: number in the episode, name and arguments, a text if the model wrote no object."""
        calls = enumerate(self.response.tool_calls, self.calls_before + 1)
        return [(number, one["function"]["name"], one["function"].get("arguments", {})) for number, one in calls]

    @property
    def names(self) -> tuple[str, str]:
        """The ids by which a later request may continue it, in each protocol."""
        return f"resp_{self.number}", f"msg_{self.number}"

    def message(self) -> Message:
        """Return the model's message, its calls with their ids."""
        message = self.response.message()
        for (number, _, _), call in zip(self.calls(), message.get("tool_calls", ())):
            call["id"] = f"call_{number}"
        return message


def read_fields(
    body: bytes,
    read: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    refused: Mapping[str, tuple[Any, str]],
) -> tuple[dict[str, Any], LeftOut]:
    """Return the fields of a request that are not null, and the names of those that have no effect.

    Args:
        body: the request, a JSON object.
        read: names of fields that are read.
        neutral: fields whose value the trainer decides -> values that change nothing.
        refused: fields that cannot be given -> the value that changes nothing, and what to do about another one.
    """
    try:
        data = json.loads(body)
        if not isinstance(data, dict):
            raise ValueError(f"it is {show(data)}")
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise RefusedRequestError(f"the body is not a JSON object ({error}): send one") from error
    data = {name: value for name, value in data.items() if value is not None}
    for name, (allowed, remedy) in refused.items():
        demand(data.get(name, allowed) == allowed, name, data.get(name), remedy)
    known = (*read, *RECORDS, *refused)
    return data, LeftOut(n for n in data if not (data[n] in neutral[n] if n in neutral else n in known))


def to_body(data: Any) -> bytes:
    return json.dumps(data).encode()  # in ASCII: some clients end a line of a stream at any of Unicode's separators


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return server-sent events that have their `type` as a name."""
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + to_body(event) + b"\n\n" for event in events)


def chat_request(schema: dict[str, Any] | None = None, **fields: Any) -> ChatRequest:
    """Return a chat request with these fields, which asks for an answer that matches a JSON schema.

    Raises:
        RefusedRequestError: for an invalid field, with its name.
    """
    try:
        chat = ChatRequest(**fields)
    except G2POError as error:
        raise RefusedRequestError(str(error), error.field) from error
    if schema is None:
        return chat
    text = _ASK_FOR_SCHEMA.format(schema=json.dumps(schema, ensure_ascii=False))
    first, *others = chat.messages
    if first["role"] != "system":
        return replace(chat, messages=[{"role": "system", "content": text}, *chat.messages])
    return replace(chat, messages=[{**first, "content": f"{first['content']}\n\n{text}".strip()}, *others])


@dataclass(frozen=True)
class Blocks:
    """The blocks of text and images in a protocol's contents.

    Args:
        field: the request's field that has them.
        texts: kind of a text -> name of its field.
        image: kind of an image.
        url: returns the data URL of an image.
    """

    field: str
    texts: Mapping[str, str]
    image: str
    url: Callable[[Mapping[str, Any]], Any]

    def read(self, content: Any, where: str, ignored: LeftOut, shows_images: bool = False) -> Any:
        """Return the content that blocks are: a text, or parts if there are images among them.

        Any other content is left to `ChatRequest`.
        """
        if not isinstance(content, list):
            return content
        blocks = [(f"{where}[{index}]", block) for index, block in enumerate(content)]
        return self.joined(blocks, ignored, shows_images)

    def joined(self, blocks: list[tuple[str, Any]], ignored: LeftOut, shows_images: bool) -> Any:
        """Return the content that blocks are, each with its place in the request."""
        parts: list[dict[str, Any]] = []
        for where, block in blocks:
            kind = block.get("type") if isinstance(block, dict) else None
            text = block.get(self.texts[kind]) if isinstance(kind, str) and kind in self.texts else None
            if isinstance(text, str):
                parts.append({"type": "text", "text": text})
            elif kind == self.image and shows_images:
                parts += ignored.image(self.url(block), block, where, f"{self.field}.{kind}", self.field)
            else:
                why = f"{where} is {show(block if kind is None else kind)}: only {_SUPPORTED[shows_images]} supported"
                ignored.unknown(f"{self.field}.{kind}", why, self.field)
        return parts if any("image" in part for part in parts) else "\n".join(part["text"] for part in parts)


def answer_schema(name: str, form: Any) -> dict[str, Any] | None:
    """Return the JSON schema in the format that an answer shall have, if it has one: messages ask for other JSON."""
    if form in (None, {"type": "text"}, {"type": "json_object"}):
        return None
    schema = form.get("schema") if isinstance(form, dict) else None
    demand(isinstance(schema, dict), name, form, "give the type text, json_object, or json_schema with a schema")
    return schema


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates take it. Without `parameters` it takes none."""
    parameters = parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters},
    }


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON text; a text is what the model wrote instead of an object."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
