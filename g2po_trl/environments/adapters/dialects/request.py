"""What all dialects share: a request and its completion, whatever protocol they are written in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....prompts.conversation import ChatRequest, ChatResponse
from ....utils.errors import G2POError

MODEL = "policy"


class RefusedRequestError(ValueError):
    """A request that is answered by an error, and is no step of the episode.

    Args:
        message: what is wrong, and what to do.
        parameter: the field of the request.
        code: a word for programs.
        status: the HTTP status. Clients retry 408, 409, 429 and those from 500; agents around them also 400 and 403.
    """

    def __init__(self, message: str, parameter: str | None = None, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent.

    Args:
        chat: what the model is asked.
        ignored: names of fields that the trainer decides otherwise.
        stream: the response is sent as events.
        fields: what its dialect needs of it for the response.
    """

    chat: ChatRequest
    ignored: tuple[str, ...] = ()
    stream: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """The model's response, the `number`-th of its episode, after `calls_before` tool calls.

    Ids made of these contain neither time nor randomness: a replayed episode gets the same ones.
    """

    response: ChatResponse
    number: int
    calls_before: int


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, without fields that are null."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise RefusedRequestError(f"the body is not valid JSON ({error}): send a JSON object") from error
    if not isinstance(data, dict):
        raise RefusedRequestError("the body is not a JSON object: send one with messages")
    return {name: value for name, value in data.items() if value is not None}


def chat_request(**fields: Any) -> ChatRequest:
    """Return a `ChatRequest`. Raises `RefusedRequestError`, with the field as its parameter, for an invalid one."""
    try:
        return ChatRequest(**fields)
    except G2POError as error:
        parameter = next((name for name in fields if str(error).startswith(name)), None)
        raise RefusedRequestError(str(error), parameter) from error


def to_body(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
