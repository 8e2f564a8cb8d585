"""Logged runs of an agent as trajectories: each call of its model is a step.

A line of a log is a JSON object in one of these formats, distinguished by their fields:

| Format | Fields |
| --- | --- |
| an episode | `task_id`, `reward`, `messages`: each message of the assistant is a call, all before it the request |
| an episode of an agent that rewrites its history | `task_id`, `reward`, `calls`: a list of requests and responses |
| a call | `task_id`, `episode_id`, its request and response |
| a result | `task_id`, `episode_id`, `reward`, of an episode whose calls are on other lines |

`success`, `tools` (of an episode or of a call) and the `id` of an episode are optional; `task` may stand for
`task_id`. A reward of `null` is no result. `reward` is on at least one line of an episode.

A request is `messages` as in OpenAI's chat completions or (with `system`) in Anthropic's Messages, or `input` (and
`instructions`) as in OpenAI's Responses; or `request`, its body. A `response` (or `output`) is a text, the assistant's
message, or the body. `agents.dialects` reads them as it reads live requests; but a log cannot be changed any more, so
parts of unknown kinds are skipped and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..agents.dialects import messages as anthropic
from ..agents.dialects import responses as openai_responses
from ..agents.dialects.request import LeftOut
from ..prompts.conversation import (
    IMAGE_PARTS,
    ROLES,
    SHOW_IMAGES,
    Message,
    as_text,
    message_text,
    normalize_messages,
    pictures_of,
    read_parts,
    response_action,
    since_last_completion,
)
from ..prompts.state_keys import request_key, state_key_text
from ..trajectory import Step, Trajectory
from ..utils.errors import G2POError
from ..utils.json import json_values, to_json
from ..utils.options import is_of_kind, require
from ..utils.show import show

StateKey = Callable[[list[Message]], Any]
_BLOCKS = ("tool_use", "tool_result", *anthropic.LEFT_OUT)  # kinds of content that only Anthropic's protocol has
_ALIASES = {"traj": "messages", "items": "input"}  # the first is tau-bench's
_OF_REQUEST = {"messages", "system", "input", "instructions", "previous_response_id", "tools"}
_OF_CALL = {*_OF_REQUEST, "request", "response", "output", "id"}
_OF_LINE = {*_OF_CALL, "calls", "episode_id", "task_id", "task", "reward", "success"}
_ASKED, _ANSWERED = {"messages", "input", "request"}, {"response", "output"}


class Skipped(LeftOut):
    """Skipped parts of a log: kind -> number of times."""

    def unknown(self, where: str, kind: Any, why: str) -> None:
        """Skip a part of an unknown kind."""
        self.add(f"{where.partition('[')[0]}.{kind}"[:60])

    def readable(self, content: list[Any], field: str, role: Any) -> list[Any]:
        """Return a content's parts of known kinds, with text marks in place of images that cannot be read."""
        parts = []
        for part in content:
            with suppress(G2POError):
                if not read_parts([part], field)[1] or role in SHOW_IMAGES:
                    parts.append(part)
                    continue
            block = {**part, "cache_control": None} if isinstance(part, Mapping) else {}  # marks of caches move
            self.unknown(field, block.get("type"), "")
            if block.get("type") in IMAGE_PARTS:  # states that show different ones are not equal
                mark = hashlib.blake2b(to_json(block, sort_keys=True).encode(), digest_size=8).hexdigest()
                parts.append({"type": "text", "text": f"[image {mark}]"})
        return parts


@dataclass
class Traces:
    """The trajectories of a log, and counts of the parts that were left out.

    Args:
        groups: for each task, in order of appearance, its trajectories. `info` has `episode`: its id, or else the
            number of its line (for several on one line, the next numbers), and `line`: its first line.
        without_calls: number of episodes without a call, which are left out.
        unread: field that was not read -> number of times.
        skipped: kind of a part of the log that was skipped -> number of times.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    without_calls: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [trajectory for group in self.groups for trajectory in group]


def trajectories_of_traces(
    lines: Iterable[str | bytes | Mapping[str, Any]], state_key: StateKey | None = None
) -> Traces:
    """Return the trajectories of the lines of a log.

    Args:
        lines: JSON texts or the objects themselves, in any mixture of the formats; blank lines are skipped.
        state_key: `messages of a request -> text or JSON data`, equal for equal states. `None`: the messages
            since the last completion, system message and tools (`request_key`).

    Raises:
        G2POError: for a line in none of the formats, and if `state_key` raises an error or returns `None`; the
            message names line, field and remedy.
    """
    return _read(enumerate(lines, 1), state_key)


def trajectories_of_file(path: str | Path, state_key: StateKey | None = None) -> Traces:
    """Return the trajectories of a log in a file: JSON Lines, or one array.

    For arguments and errors see `trajectories_of_traces`.
    """
    with Path(path).open("rb") as file:
        return _read(json_values(file), state_key)


def _read(numbered: Iterable[tuple[int, Any]], state_key: StateKey | None) -> Traces:
    reader = _Reader(state_key)
    for number, line in numbered:
        if not isinstance(line, (str, bytes)) or line.strip():
            with _at(f"line {number}: "):
                reader.read(number, _parse(line))
    return reader.finish()


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Name the place in an error."""
    try:
        yield
    except ValueError as error:
        name = getattr(error, "field", None) or getattr(error, "parameter", None)
        raise G2POError(f"{where}{error}", name) from error


def _parse(line: Any) -> dict[str, Any]:
    try:
        data = json.loads(line) if isinstance(line, (str, bytes)) else line
    except (ValueError, RecursionError) as error:
        raise G2POError(f"not valid JSON ({error}); write one object per line", "line") from error
    remedy = "write a JSON object per line, with task_id, reward and messages"
    require(isinstance(data, Mapping), "line", data, remedy)
    return _present(data)


def _present(data: Any) -> dict[str, Any]:
    """Return an object without fields that are null, as writers of records leave them, except a null reward."""
    data = data if isinstance(data, Mapping) else {}
    return {_ALIASES.get(name, name): data[name] for name in data if data[name] is not None or name == "reward"}


@dataclass
class _Episode:
    """An episode whose lines are being read; `responses`: conversations that a later request may continue, by id."""

    task_id: str
    name: str | int
    line: int
    task: str | None = None
    steps: list[Step] = field(default_factory=list)
    final: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    responses: dict[str, list[Message]] = field(default_factory=dict)

    def add_result(self, data: Mapping[str, Any]) -> None:
        """Take reward and success of a line, which an earlier line of the episode may not contradict."""
        is_given = "reward" in data or "episode_id" in data
        require(is_given, "reward", None, "give the episode's total reward, or null if it has no result")
        for name in {"reward", "success"} & data.keys():
            value, before = data[name], self.result.get(name)
            is_same = before is None or value in (None, before)
            require(is_same, name, value, f"an earlier line of the episode has {before}, give it on one line")
            self.result[name] = before if value is None else value

    def trajectory(self) -> Trajectory:
        """Return the episode as a trajectory, without a result if its reward is null."""
        remedy = f"give a line of episode {show(self.name)} its total reward, or null if it has no result"
        require("reward" in self.result, "reward", "missing", remedy)
        info = {"episode": self.name, "line": self.line}
        facts: dict[str, Any] = {"final_observation": self.final, "info": info, "task": self.task}
        reward = self.result["reward"]
        if reward is None:
            return Trajectory(self.task_id, self.steps, 0.0, "error", error="its reward is null", **facts)
        outcome = "success" if self.result.get("success", reward > 0) else "failure"
        return Trajectory(self.task_id, self.steps, float(reward), outcome, **facts)


class _Reader:
    def __init__(self, state_key: StateKey | None):
        self.state_key = state_key
        self.episodes: dict[tuple[str, str | int], _Episode] = {}
        self.free: dict[str, int] = {}  # of each task, the next number for an episode without a name
        self.traces = Traces()
        self.skipped = self.traces.skipped

    def read(self, number: int, data: dict[str, Any]) -> None:
        _check(data)
        self.traces.unread.update(data.keys() - _OF_LINE)
        given = data.keys() & (_ASKED | _ANSWERED)
        if "calls" in data:
            require(not given | data.keys() & {"episode_id"}, "calls", show(data["calls"]), f"leave out {given}")
            episode = self._episode(number, data, "id")
            for index, call in enumerate(data["calls"]):
                with _at(f"calls[{index}]: "):
                    self.traces.unread.update(f"calls.{name}" for name in _present(call).keys() - _OF_CALL)
                    self._add_call(episode, {"tools": data.get("tools"), **_present(call)})
        elif given & (_ANSWERED | {"request"}) or (given and "episode_id" in data):
            require("episode_id" in data, "episode_id", None, "a call has one, an episode on one line has messages")
            self._add_call(self._episode(number, data, "episode_id"), data)
        elif given:
            self._add_conversation(self._episode(number, data, "id"), data)
        else:
            remedy = "give the conversation as messages, or the requests and responses as calls"
            require("episode_id" in data, "messages", None, remedy)
            self._episode(number, data, "episode_id")

    def _episode(self, number: int, data: Mapping[str, Any], named: str) -> _Episode:
        """Return the episode of a line, with the line's result. `named`: the field with its name."""
        value = data.get("task_id", data.get("task"))
        is_id = isinstance(value, (str, int, Mapping)) and not isinstance(value, bool)
        require(is_id, "task_id", value, "give the episodes of a task, which are compared, the same text or number")
        task_id = value if isinstance(value, str) else to_json(value, sort_keys=True)
        if (name := data.get(named)) is None:
            name = max(number, self.free.get(task_id, 0))
            self.free[task_id] = name + 1
        else:
            name = str(name)  # a text is never equal to a number
        is_new = (task_id, name) not in self.episodes
        require(is_new or named != "id", "id", name, "an earlier line has it, give each episode its own, or none")
        episode = self.episodes.setdefault((task_id, name), _Episode(task_id, name, number))
        if episode.task is None and "task" in data:
            episode.task = data["task"] if isinstance(data["task"], str) else to_json(data["task"], sort_keys=True)
        episode.add_result(data)
        return episode

    def _add_conversation(self, episode: _Episode, data: Mapping[str, Any]) -> None:
        messages, tools, _ = self._request(data)
        end = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                end = index + 1
                if index > 0:  # one at the beginning answers no request
                    self._add_step(episode, messages[:index], tools, message)
        episode.final = as_text(messages[end:]) or None

    def _add_call(self, episode: _Episode, call: Mapping[str, Any]) -> None:
        body = _present(call.get("request"))
        self.traces.unread.update(f"request.{name}" for name in body.keys() - _OF_REQUEST)
        data = _present({**body, **call})
        for name, names in (("messages", _ASKED), ("response", _ANSWERED)):
            require(bool(names & data.keys()), name, None, "a call has messages and response")
        _check(data)
        messages, tools, instructions = self._request(data)
        given = data["response"] if "response" in data else {"output": data["output"], "id": data.get("id")}
        message, is_cut, name = self._response(given)
        if (after := data.get("previous_response_id")) is not None:
            if str(after) not in episode.responses:
                self.skipped.add("an earlier response, which is not in the log")
            messages[instructions:instructions] = episode.responses.get(str(after), ())
        if name is not None:
            episode.responses[name] = [*messages[instructions:], message]
        self._add_step(episode, messages, tools, message, is_cut)

    def _request(self, data: Mapping[str, Any]) -> tuple[list[Message], Any, int]:
        """Return normalized messages, tools, and how many of the messages belong to this request only."""
        instructions = openai_responses.read_instructions(data) if "input" in data else []
        if "input" in data:
            messages = [*instructions, *openai_responses.read_items(data["input"], self.skipped)]
        elif "system" in data or _has_blocks(data.get("messages")):
            messages = anthropic.read_messages(data, self.skipped)
        else:
            messages = data.get("messages")
        if isinstance(messages, list):
            messages = [self._known(one, "input" if "input" in data else "messages") for one in messages]
            roles = [one.get("role") if isinstance(one, Mapping) else None for one in messages]
            unknown = [role for role in roles if isinstance(role, str) and role not in ROLES]
            self.skipped.update(f"messages of role {role}" for role in unknown)
            messages = [one for one, role in zip(messages, roles) if role not in unknown]
        return normalize_messages(messages), self._tools(data.get("tools")), len(instructions)

    def _tools(self, tools: Any) -> Any:
        """Return tools as chat templates take them, by their own form, which may differ from that of the messages."""
        if any("input_schema" in tool for tool in tools or ()):
            return anthropic.read_tools(tools, self.skipped)
        if any("type" in tool and not {"function", "custom"} & tool.keys() for tool in tools or ()):
            return openai_responses.read_tools(tools, self.skipped)[0]
        return tools

    def _response(self, response: Any) -> tuple[Message, bool, str | None]:
        """Return the assistant's message, whether it was cut, and the id by which a later request may continue it."""
        body = {"content": response} if isinstance(response, str) else response
        body = body if isinstance(body, Mapping) else {}
        message, is_cut, name = None, False, None
        if isinstance(body.get("choices"), list) and len(body["choices"]) == 1 and _present(body["choices"][0]):
            (choice,) = body["choices"]
            message, is_cut = choice.get("message"), choice.get("finish_reason") == "length"
        elif "output" in body:
            output, name = body["output"], str(body["id"]) if body.get("id") else None
            if isinstance(output, str) or (isinstance(output, Mapping) and "output" not in output):
                message, is_cut, _ = self._response(output)
            else:
                items = openai_responses.read_items(output, self.skipped)
                answers = [item for item in items if item["role"] == "assistant"]
                message = answers[-1] if answers else {"content": ""}
            is_cut = is_cut or body.get("status") == "incomplete"
        elif {"content", "tool_calls"} & body.keys():
            message, is_cut = {**body, "role": body.get("role", "assistant")}, body.get("stop_reason") == "max_tokens"
            if _has_blocks([body]) or body.get("type") == "message":
                (message,) = anthropic.read_messages({"messages": [message]}, self.skipped)[-1:]
        message = self._known(message, "input" if "output" in body else "messages")
        is_answer = isinstance(message, Mapping) and message.get("role", "assistant") == "assistant"
        require(is_answer, "response", show(response), "give the assistant's message, or the whole response")
        return normalize_messages([{**message, "role": "assistant"}])[0], is_cut, name

    def _known(self, message: Any, field: str) -> Any:
        """Return a message of a request's field without parts of unknown kinds."""
        if not isinstance(message, Mapping):
            return message
        if message.get("function_call") is not None:
            self.skipped.add("messages.function_call")
        content, role = message.get("content"), message.get("role")
        content = self.skipped.readable(content, field, role) if isinstance(content, list) else content
        return {**message, "content": content, "function_call": None}

    def _add_step(
        self, episode: _Episode, request: list[Message], tools: Any, message: Message, is_cut: bool = False
    ) -> None:
        news = since_last_completion(request) or request
        completion = "\n\n".join(filter(None, [message.get("reasoning_content"), message_text(message)]))
        episode.steps.append(
            Step(
                as_text(news),
                response_action(message),
                state_key=request_key(request, tools) if self.state_key is None else self._own_key(request),
                completion=completion,
                completion_truncated=is_cut,
                messages=news,
                images=pictures_of(news) or None,
            )
        )

    def _own_key(self, request: list[Message]) -> str:
        try:
            key = self.state_key(request)
        except Exception as error:
            raise G2POError(f"state_key raised {type(error).__name__}: {error}", "state_key") from error
        return state_key_text(key)

    def finish(self) -> Traces:
        groups: dict[str, list[Trajectory]] = {}
        for episode in self.episodes.values():
            with _at(f"line {episode.line}: "):
                trajectory = episode.trajectory()
            if episode.steps:
                groups.setdefault(episode.task_id, []).append(trajectory)
        self.traces.without_calls = sum(not episode.steps for episode in self.episodes.values())
        self.traces.groups = list(groups.values())
        for number, group in enumerate(self.traces.groups):
            for trajectory in group:
                trajectory.group = number
        return self.traces


def _check(data: Mapping[str, Any]) -> None:
    """Refuse a value that its field does not take."""
    for name, (fits, remedy) in _FIELDS.items():
        require(name not in data or fits(data[name]), name, data.get(name), remedy)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, Mapping) for part in value)


_NAME = (lambda value: is_of_kind(value, int) or isinstance(value, str)), "give a text or a whole number"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # -> whether a value is one, and what to give instead
    "reward": (lambda value: value is None or is_of_kind(value, float), "give a finite number, or null"),
    "success": (lambda value: isinstance(value, bool), "give true or false, or leave it out"),
    "tools": (_are_objects, "give a list of JSON schemas, or leave it out"),
    "calls": (_are_objects, "give a list of objects with messages and response"),
    "request": (lambda value: isinstance(value, Mapping), "give the body of the request"),
    "id": _NAME,
    "episode_id": _NAME,
}


def _has_blocks(messages: Any) -> bool:
    """Return whether contents have blocks of Anthropic's protocol."""
    contents = [one.get("content") for one in messages or () if isinstance(one, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return any(isinstance(block, Mapping) and (block.get("type") in _BLOCKS or "source" in block) for block in blocks)
