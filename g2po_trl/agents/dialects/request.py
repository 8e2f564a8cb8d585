"""Requests and completions in a form that all dialects share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...prompts.conversation import ChatRequest, ChatResponse
from ...utils.errors import G2POError
from ...utils.show import show

MODEL = "policy"
# Fields of messages of chat completions, which logs also have in the places of other protocols.
CHAT_FIELDS = ("name", "reasoning_content", "tool_call_id", "tool_calls")
# Fields that clients send for their own records.
_RECORDS = ("client_metadata", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
_RECORDS += ("service_tier", "store", "stream_options", "user")
# Values that change nothing, of fields that the trainer decides; others are ignored and named.
_NEUTRAL = {
    "model": (MODEL,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),  # a call cannot be promised
    "toolConfig": tuple({"functionCallingConfig": {"mode": mode}} for mode in ("AUTO", "VALIDATED", "NONE")),
    "truncation": ("disabled",),
}
_NO_TOOLS = ("none", {"type": "none"}, {"functionCallingConfig": {"mode": "NONE"}})
_ASK_FOR_SCHEMA = "The final answer is a JSON object that matches this JSON schema, and nothing else:\n{schema}"


class RefusedRequestError(ValueError):
    """A request that is answered with an error and is not a step of the episode. `parameter`: a field of the request.

    Of HTTP statuses, clients retry 408, 409, 429 and those from 500; agents around them also 400 and 403.
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

    def unknown(self, where: str, kind: Any, why: str) -> None:
        """Refuse a part of an unknown kind. For logs, a subclass leaves it out instead."""
        raise RefusedRequestError(why, where.partition("[")[0])

    def schema(self, name: str, config: Any) -> dict[str, Any] | None:
        """Return the JSON schema in a field's `format`. Others, and JSON that messages ask for, are left out."""
        form = config.get("format") if isinstance(config, dict) else None
        if config not in ({}, {"format": form}) or form == {"type": "json_object"}:
            self.add(name)
        if form in (None, {"type": "text"}, {"type": "json_object"}):
            return None
        schema = form.get("schema") if isinstance(form, dict) else None
        demand(isinstance(schema, dict), name, form, "give the type text, json_object, or json_schema with a schema")
        return schema


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent."""

    asked: ChatRequest  # without the schema
    ignored: tuple[str, ...] = ()  # names of fields that the trainer decides otherwise
    stream: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # what its dialect needs for the response
    after: Any = None  # id of the response that the messages continue, without those up to it
    instructions: int = 0  # number of messages at the beginning that a request after this one does not continue
    in_thread: bool = False  # it keeps the instructions, tools and schema of the request that `after` answered
    schema: Any = None  # of the answer, for this request alone

    @property
    def chat(self) -> ChatRequest:
        """What the model is asked, with the schema in its system message."""
        if self.schema is None:
            return self.asked
        first, *others = self.asked.messages
        if first["role"] != "system":
            first, others = {"role": "system", "content": ""}, self.asked.messages
        text = _ASK_FOR_SCHEMA.format(schema=json.dumps(self.schema, ensure_ascii=False))
        return replace(self.asked, messages=[{**first, "content": f"{first['content']}\n\n{text}".strip()}, *others])

    @property
    def rough_tokens(self) -> int:
        """Return a rough number of its tokens, four characters each: a worker has no tokenizer."""
        return len(f"{self.chat.messages}{self.chat.tools or ''}") // 4

    @classmethod
    def of(
        cls, data: Mapping[str, Any], ignored: LeftOut, messages: Any, tools: Any, stop: str, limit: str, **fields: Any
    ) -> AgentRequest:
        """Return the request that a body's fields are; `stop` and `limit` (of tokens) are names of fields."""
        if data.get("tool_choice", data.get("toolConfig")) in _NO_TOOLS:
            tools = None
        try:
            asked = ChatRequest(messages, tools, data.get(stop, []), data.get(limit))
        except G2POError as error:
            name = (error.field or "").partition("[")[0]
            name = next((one for one in ("input", "contents") if name == "messages" and one in data), name)
            raise RefusedRequestError(str(error), name) from error
        return cls(asked, tuple(sorted(ignored)), bool(data.get("stream")), **fields)

    def whole(self, answered: Sequence[tuple[AgentRequest, Completion]]) -> AgentRequest:
        """Return the request with all messages that it continues, from its episode's completions so far."""
        if self.after is None:
            return self
        for earlier, completion in answered:
            if self.after in (f"resp_{completion.number}", f"msg_{completion.number}"):
                before = earlier.asked.messages[0 if self.in_thread else earlier.instructions :]
                own, new = self.asked.messages[: self.instructions], self.asked.messages[self.instructions :]
                kept = earlier if self.in_thread else self
                messages = [*own, *before, completion.response.message(), *new]
                asked = replace(self.asked, messages=messages, tools=kept.asked.tools)
                return replace(self, asked=asked, schema=self.schema or kept.schema)
        raise RefusedRequestError(f"{show(self.after)} is not of this episode: send the messages", code="not_found")


@dataclass(frozen=True)
class Completion:
    """The model's response, the `number`-th of its episode; its calls have ids.

    Ids contain neither time nor randomness: a replayed episode gets the same ones.
    """

    response: ChatResponse
    number: int

    def calls(self) -> Iterator[tuple[str, str, dict[str, Any], str]]:
        """Yield each tool call's id, name, arguments, and their JSON, or what the model wrote."""
        for call in self.response.tool_calls:
            arguments = call["function"].get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            given = arguments if isinstance(arguments, dict) else {"arguments": arguments}  # protocols have objects
            yield call["id"], call["function"]["name"], given, text

    def usage(self, *names: str) -> dict[str, int]:
        """Return the tokens of prompt, completion, and both, by these names."""
        numbers = self.response.prompt_tokens, self.response.completion_tokens
        return dict(zip(names, (*numbers, sum(numbers))))


def read_fields(
    body: bytes, read: Collection[str], refused: Mapping[str, tuple[Any, str]], prepare: Callable[[Any], Any] = dict
) -> tuple[dict[str, Any], LeftOut]:
    """Return the fields of a body that are not null, prepared, and the names of those that have no effect.

    `read` are fields that are read, `refused`: field -> the only value it may have, and what to do about another one.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise RefusedRequestError(f"the body is not a JSON object ({error}): send one") from error
    demand(isinstance(data, dict), "body", data, "send a JSON object")
    data = {name: value for name, value in prepare(data).items() if value is not None}
    for name, (allowed, remedy) in refused.items():
        demand(data.get(name, allowed) == allowed, name, data.get(name), remedy)
    known = (*read, *_RECORDS, *refused)
    return data, LeftOut(n for n in data if not (data[n] in _NEUTRAL[n] if n in _NEUTRAL else n in known))


def function_tool(tool: Any, where: str, parameters: str, prefix: str = "") -> dict[str, Any]:
    """Return a tool as chat templates take it. `parameters` names its field; without a value it takes none."""
    demand(isinstance(tool, dict) and isinstance(tool.get("name"), str), where, tool, "give a function with a name")
    schema = tool.get(parameters) or {"type": "object", "properties": {}}
    function = {"name": prefix + tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def to_stream(events: Iterable[Any]) -> str:
    """Return server-sent events, by name those that have a `type`; a text is an event as it is."""
    stream = ""
    for event in events:  # in ASCII: some clients end a line of a stream at any of Unicode's separators
        stream += f"event: {event['type']}\n" if "type" in event else ""
        stream += f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
    return stream
