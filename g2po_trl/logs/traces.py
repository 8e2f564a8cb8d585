"""Logged runs of an agent as trajectories: each call of its model is a step.

A line of a log is a JSON object in one of these formats (`FORMATS`), distinguished by their fields:

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
message, or the body. An episode of items has `items` in place of `messages`. Parts of unknown kinds are skipped and
counted (`protocols`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..prompts.conversation import (
    Message,
    as_text,
    message_text,
    pictures_of,
    response_action,
    since_last_completion,
)
from ..prompts.state_keys import request_key, state_key_text
from ..trajectory import Step, Trajectory
from ..utils.json import json_values
from ..utils.show import show
from .fields import COMMON, Episode, check_fields, task_of
from .protocols import REQUEST_FIELDS, Request, Response, Skipped, Tools, read_request, read_response

StateKey = Callable[[list[Message]], Any]


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
        ValueError: for a line in none of the formats, and if `state_key` raises an error or returns `None`; the
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
        if isinstance(line, (str, bytes)) and not line.strip():
            continue
        with _at(number):
            reader.read(number, _parse(line))
    return reader.finish()


@contextmanager
def _at(number: int) -> Iterator[None]:
    """Name the line in an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


class _Reader:
    def __init__(self, state_key: StateKey | None):
        self.state_key = state_key
        self.episodes: dict[tuple[str, str | int], Episode] = {}
        self.free: dict[str, int] = {}  # of each task, the next number for an episode without a name
        self.results: list[tuple[int, Mapping[str, Any]]] = []
        self.found = Traces()

    def read(self, number: int, data: Mapping[str, Any]) -> None:
        form = _format_of(data)
        check_fields(data)
        if form.fields:
            self.found.unread.update(data.keys() - form.fields - COMMON)
        form.read(self, number, data)

    def read_conversation(self, number: int, data: Mapping[str, Any]) -> None:
        episode = self._episode(number, data, "id")
        request = read_request(data, self.found.skipped)
        end = 0
        for place, message in enumerate(request.messages):
            if message["role"] != "assistant":
                continue
            end = place + 1
            if place > 0:  # one at the beginning answers no request
                self._add_step(episode, request.messages[:place], request.tools, Response(message))
        episode.final = as_text(request.messages[end:]) or None

    def read_calls(self, number: int, data: Mapping[str, Any]) -> None:
        episode = self._episode(number, data, "id")
        for place, call in enumerate(data["calls"]):
            where, call = f"calls[{place}]", _present(call)
            if not isinstance(call, Mapping) or not _RESPONSE & call.keys() or not _REQUEST & call.keys():
                raise ValueError(f"{where} is {show(call)}; give an object with messages and response")
            known = _FIELDS_OF_A_CALL | {"tools"}
            self.found.unread.update(f"calls.{name}" for name in call.keys() - known)
            self._add_call(episode, {"tools": data.get("tools"), **call}, f"{where}.")

    def read_call(self, number: int, data: Mapping[str, Any]) -> None:
        for name, others in (("response", _RESPONSE), ("messages", _REQUEST), ("episode_id", {"episode_id"})):
            if not others & data.keys():
                raise ValueError(
                    f"{name} is missing; a call has messages, response and episode_id, an episode on one line has "
                    "messages and id"
                )
        self._add_call(self._episode(number, data, "episode_id"), data)

    def read_result(self, number: int, data: Mapping[str, Any]) -> None:
        task_of(data)
        self.results.append((number, data))

    def _episode(self, number: int, data: Mapping[str, Any], named: str) -> Episode:
        """Return the episode of a line, with the line's result. `named`: the field with its name."""
        task_id, task = task_of(data)
        if (name := data.get(named)) is None:
            name = max(number, self.free.get(task_id, 0))
            self.free[task_id] = name + 1
        else:
            name = str(name)  # a text is never equal to a number
        known = self.episodes.get((task_id, name))
        if known is not None and named == "id":
            raise ValueError(
                f"id is {show(name)}, as on line {known.line} of the same task: give each episode a different id, "
                "or none"
            )
        episode = known or Episode(task_id, name, number)
        episode.task = episode.task or task
        episode.set_result(data)
        self.episodes[task_id, name] = episode
        return episode

    def _add_call(self, episode: Episode, call: Mapping[str, Any], where: str = "") -> None:
        body = _present(call["request"]) if isinstance(call.get("request"), Mapping) else {}
        self.found.unread.update(f"request.{name}" for name in body.keys() - REQUEST_FIELDS - {"tools"})
        data = {**body, **_present(call)}
        skipped = self.found.skipped
        try:
            check_fields({name: data[name] for name in ("request", "tools") if name in data})
            request = read_request(data, skipped)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
        given = data["response"] if "response" in data else {"output": data["output"], "id": data.get("id")}
        response = read_response(given, f"{where}response", skipped)
        after = data.get("previous_response_id")
        messages = request.messages if after is None else self._whole(episode, request, str(after))
        if response.id is not None:
            episode.responses[response.id] = [*messages[request.instructions :], response.message]
        self._add_step(episode, messages, request.tools, response)

    def _whole(self, episode: Episode, request: Request, after: str) -> list[Message]:
        """Return a request's messages after those of the response `after`, which it continues."""
        if after not in episode.responses:
            self.found.skipped.add("an earlier response, which is not in the log")
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        return [*own, *episode.responses.get(after, ()), *new]

    def _add_step(self, episode: Episode, request: list[Message], tools: Tools, response: Response) -> None:
        news, message = since_last_completion(request), response.message
        key = request_key(request, tools) if self.state_key is None else self._own_key(request)
        completion = "\n\n".join(filter(None, [message.get("reasoning_content"), message_text(message)]))
        episode.steps.append(
            Step(
                as_text(news or request),
                response_action(message),
                state_key=key,
                completion=completion,
                completion_truncated=response.is_cut,
                messages=news or request,
                images=pictures_of(news or request) or None,
            )
        )

    def _own_key(self, request: list[Message]) -> str:
        try:
            key = self.state_key(request)
        except Exception as error:
            raise ValueError(f"state_key raised {type(error).__name__}: {error}") from error
        return state_key_text(key)

    def finish(self) -> Traces:
        for number, data in self.results:
            with _at(number):
                self._episode(number, data, "episode_id")
        groups: dict[str, list[Trajectory]] = {}
        for episode in self.episodes.values():
            if not episode.has_reward:
                raise ValueError(
                    f"line {episode.line}: no line of the episode {show(episode.name)} of task "
                    f"{show(episode.task_id)} has a reward; give one of them its total reward, or null if it has no "
                    "result"
                )
            if not episode.steps:
                self.found.without_calls += 1
                continue
            groups.setdefault(episode.task_id, []).append(episode.trajectory())
        self.found.groups = list(groups.values())
        for number, trajectory in ((n, t) for n, group in enumerate(self.found.groups) for t in group):
            trajectory.group = number
        return self.found


def _parse(line: Any) -> Mapping[str, Any]:
    try:
        data = json.loads(line) if isinstance(line, (str, bytes)) else line
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}); write one object per line") from error
    if not isinstance(data, Mapping):
        others = [one for one in data if not isinstance(one, Mapping)] if isinstance(data, list) else []
        what = f"{show(others[0])} in an array" if others else show(data)
        raise ValueError(f"{what} is not a JSON object; write one per line, with task_id, reward and messages")
    return _present(data)


def _present(data: Any) -> Any:
    """Return an object without fields that are null, as writers of records leave them, except a null reward."""
    if not isinstance(data, Mapping):
        return data
    return {name: value for name, value in data.items() if value is not None or name == "reward"}


_REQUEST = {*REQUEST_FIELDS - {"system", "instructions", "previous_response_id"}, "request"}
_RESPONSE = {"response", "output"}
_FIELDS_OF_A_CALL = {*REQUEST_FIELDS, *_RESPONSE, "request", "id"}


@dataclass(frozen=True)
class Format:
    """A format of a line.

    Args:
        fits: whether a line's fields have this format.
        read: takes the reader, the line's number and its fields.
        fields: names of fields that are read, in addition to the common ones. None: all.
    """

    fits: Callable[[Mapping[str, Any]], Any]
    read: Callable[[_Reader, int, Mapping[str, Any]], None]
    fields: frozenset[str] = frozenset()


FORMATS = {  # the first that fits
    "calls": Format(lambda data: "calls" in data, _Reader.read_calls, frozenset({"calls", "id"})),
    "call": Format(
        lambda data: data.keys() & {*_RESPONSE, "request"} or (data.keys() & _REQUEST and "episode_id" in data),
        _Reader.read_call,
        frozenset({*_FIELDS_OF_A_CALL, "episode_id"}),
    ),
    "episode": Format(
        lambda data: data.keys() & _REQUEST, _Reader.read_conversation, frozenset({*REQUEST_FIELDS, "id"})
    ),
    "result": Format(lambda data: "episode_id" in data, _Reader.read_result, frozenset({"episode_id"})),
}


def _format_of(data: Mapping[str, Any]) -> Format:
    form = next((form for form in FORMATS.values() if form.fits(data)), None)
    if form is None:
        raise ValueError(
            f"there is neither messages nor calls among the fields {', '.join(map(str, data)) or '(none)'}; give the "
            "conversation as messages, or the requests and responses as calls"
        )
    if form is FORMATS["calls"] and (wrong := sorted(data.keys() & {*_REQUEST, *_RESPONSE, "episode_id"})):
        raise ValueError(f"there are both calls and {', '.join(wrong)}; an episode on one line has calls and id")
    return form
