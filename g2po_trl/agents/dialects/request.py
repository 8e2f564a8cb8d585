"""Requests and completions in a form that all dialects share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...prompts.conversation import ChatRequest, ChatResponse, Message
from ...utils.errors import G2POError
from ...utils.images import as_picture
from ...utils.show import show

MODEL = "policy"
# Fields of messages of chat completions, which logs also have in the places of other protocols.
CHAT_FIELDS = ("name", "reasoning_content", "tool_call_id", "tool_calls")
SUPPORTED = ("text is", "text and images are")  # in a content, by whether its role shows images
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
            if not isinstance(url, str) or not url.startswith("data:"):
                raise G2POError(
                    f"{where} is {show(part)}: no address or file is read; send the image itself in base64"
                )
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
        references: place of a message -> ids of the items of earlier responses that it stands for.
    """

    chat: ChatRequest
    ignored: tuple[str, ...] = ()
    stream: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    after: Any = None
    instructions: int = 0
    keeps_tools: bool = False
    references: Mapping[int, Sequence[Any]] = field(default_factory=dict)

    def whole(self, answered: Sequence[tuple[AgentRequest, Completion]]) -> AgentRequest:
        """Return the request with all messages that it continues or refers to, from its episode's completions so far.

        Raises `RefusedRequestError` for an id that none of them has.
        """
        if self.after is None and not self.references:
            return self
        messages, tools = list(self.chat.messages), self.chat.tools
        for place, names in sorted(self.references.items(), reverse=True):
            items = [_named(name, answered)[1] for name in names]
            messages[place : place + 1] = [one.message() for one in {item.number: item for item in items}.values()]
        if self.after is not None:
            earlier, completion = _named(self.after, answered)
            tools = earlier.chat.tools if self.keeps_tools else tools
            before = [*earlier.chat.messages[earlier.instructions :], completion.message()]
            messages[self.instructions : self.instructions] = before
        return replace(self, chat=chat_request(**{**vars(self.chat), "messages": messages, "tools": tools}))


def _named(name: Any, answered: Sequence[tuple[AgentRequest, Completion]]) -> tuple[AgentRequest, Completion]:
    """Return the completion with an item or a response of this id, and its request."""
    for request, completion in answered:
        if name in completion.names:
            return request, completion
    raise RefusedRequestError(f"{show(name)} is not a response of this episode: send the messages", code="not_found")


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
    def names(self) -> list[str]:
        """The ids by which a later request may refer to it: of the response, its message and its calls."""
        return [f"resp_{self.number}", f"msg_{self.number}", *(f"fc_{number}" for number, _, _ in self.calls())]

    def message(self) -> Message:
        """Return the model's message, its calls with their ids."""
        message = self.response.message()
        for (number, _, _), call in zip(self.calls(), message.get("tool_calls", ())):
            call["id"] = f"call_{number}"
        return message


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, without fields that are null."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise RefusedRequestError(f"the body is not valid JSON ({error}): send a JSON object") from error
    if not isinstance(data, dict):
        raise RefusedRequestError("the body is not a JSON object: send one with messages")
    return {name: value for name, value in data.items() if value is not None}


def to_body(data: Any) -> bytes:
    return json.dumps(data).encode()  # in ASCII: some clients end a line of a stream at any of Unicode's separators


def chat_request(schema: dict[str, Any] | None = None, **fields: Any) -> ChatRequest:
    """Return a chat request with these fields, which asks for an answer that matches a JSON schema.

    Raises:
        RefusedRequestError: for an invalid field, with its name.
    """
    try:
        chat = ChatRequest(**fields)
    except G2POError as error:
        parameter = next((name for name in fields if str(error).startswith(name)), None)
        raise RefusedRequestError(str(error), parameter) from error
    if schema is None:
        return chat
    text = _ASK_FOR_SCHEMA.format(schema=json.dumps(schema, ensure_ascii=False))
    first, *others = chat.messages
    if first["role"] != "system":
        return replace(chat, messages=[{"role": "system", "content": text}, *chat.messages])
    return replace(chat, messages=[{**first, "content": f"{first['content']}\n\n{text}".strip()}, *others])


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as one text if there is no image among them."""
    return parts if any("image" in part for part in parts) else "\n".join(part["text"] for part in parts)


def answer_schema(name: str, form: Any) -> dict[str, Any] | None:
    """Return the JSON schema in the format that an answer shall have, if it has one: messages ask for other JSON."""
    if form in (None, {"type": "text"}, {"type": "json_object"}):
        return None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        remedy = "give the type text, json_object, or json_schema with a schema"
        raise RefusedRequestError(f"{name} is {show(form)}: {remedy}", name)
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


def openai_error(refusal: RefusedRequestError) -> bytes:
    """Return the body of an error in OpenAI's protocols."""
    message, kind = str(refusal), "invalid_request_error"
    return to_body({"error": {"message": message, "type": kind, "param": refusal.parameter, "code": refusal.code}})
