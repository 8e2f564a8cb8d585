"""Logged runs of an agent as trajectories: each call of its model is a step.

A line is a JSON object: an episode, a call, or a result (docs/elsewhere.md has the fields). `agents.dialects` reads
requests and responses as live ones, but parts of unknown kinds are skipped and counted.
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
_ALIASES = {"traj": "messages", "items": "input"}  # the first is tau-bench's
_ASKED, _ANSWERED = {"messages", "input", "request"}, {"response", "output"}
_OF_CALL = {*_ASKED, *_ANSWERED, "system", "instructions", "previous_response_id", "tools"}
_READ = {*_OF_CALL, "task_id", "task", "id", "episode_id", "reward", "success", "calls"}


class Skipped(LeftOut):
    """Skipped parts of a log: kind -> number of times."""

    def unknown(self, where: str, kind: Any, why: str) -> None:
        """Skip a part of an unknown kind."""
        self.add(f"{where.partition('[')[0]}.{kind}"[:60])

    def without(self, messages: Iterable[Message], field: str) -> list[Message]:
        """Return messages without unknown roles and kinds of content; a text marks an image that cannot be read."""
        known = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if isinstance(role, str) and role not in ROLES:
                self.add(f"messages of role {role}")
                continue
            if isinstance(content, list):
                message = {
                    **message,
                    "content": [one for part in content for one in self._readable(part, field, role)],
                }
            known.append(message)
        return known

    def _readable(self, part: Any, field: str, role: Any) -> list[Any]:
        with suppress(G2POError):
            if not read_parts([part], field)[1] or role in SHOW_IMAGES:
                return [part]
        kind = part.get("type") if isinstance(part, Mapping) else None
        self.unknown(field, kind, "")
        if kind not in IMAGE_PARTS:
            return []
        shown = to_json({**part, "cache_control": None}, sort_keys=True)  # whose marks move
        return [{"type": "text", "text": f"[image {hashlib.blake2b(shown.encode(), digest_size=8).hexdigest()}]"}]


@dataclass
class Traces:
    """The trajectories of a log, and counts of the parts that were left out.

    Args:
        groups: for each task, in order of appearance, its trajectories. `info` has `episode`: its id, or else the
            number of its line, and `line`: its first line.
        without_calls: number of episodes without a call, which are left out.
        unread: field of lines that was not read -> number of times.
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

    @property
    def steps(self) -> list[Step]:
        """The calls of all trajectories."""
        return [step for trajectory in self.trajectories for step in trajectory.steps]


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
    """Return the trajectories of a file, JSON Lines or one array; for errors see `trajectories_of_traces`."""
    return _read(json_values(path), state_key)


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
    require(isinstance(data, Mapping), "line", data, "write a JSON object with task_id, reward and messages")
    return _present(data)


def _present(data: Any) -> dict[str, Any]:
    """Return an object without fields that are null, as writers of records leave them, except a null reward."""
    data = data if isinstance(data, Mapping) else {}
    return {_ALIASES.get(name, name): data[name] for name in data if data[name] is not None or name == "reward"}


@dataclass
class _Episode:
    """An episode that is being read; `responses`: conversations that a later request may continue, by id."""

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
        for name in {"reward", "success"} & data.keys():
            value, before = data[name], self.result.get(name)
            is_same = before is None or value in (None, before)
            require(is_same, name, value, f"an earlier line of the episode has {before}, give it on one line")
            self.result[name] = before if value is None else value

    def trajectory(self) -> Trajectory:
        """Return the episode as a trajectory, without a result if its reward is null."""
        remedy = f"give a line of episode {show(self.name)} its total reward, or null if it has no result"
        require("reward" in self.result, "reward", "missing", remedy)
        info, reward = {"episode": self.name, "line": self.line}, self.result["reward"]
        if reward is None:
            error = "its reward is null"
            return Trajectory(self.task_id, self.steps, 0.0, "error", self.final, error, info, task=self.task)
        outcome = "success" if self.result.get("success", reward > 0) else "failure"
        return Trajectory(self.task_id, self.steps, float(reward), outcome, self.final, None, info, task=self.task)


class _Reader:
    """Episodes of the lines that were read, by task and name."""

    def __init__(self, state_key: StateKey | None):
        self.state_key = state_key
        self.episodes: dict[tuple[str, str | int], _Episode] = {}
        self.traces = Traces()
        self.skipped = self.traces.skipped

    def read(self, number: int, data: dict[str, Any]) -> None:
        self.traces.unread.update(data.keys() - _READ)
        given = data.keys() & (_ASKED | _ANSWERED)
        if "calls" in data:
            are_objects = isinstance(data["calls"], list) and all(isinstance(call, Mapping) for call in data["calls"])
            require(are_objects, "calls", data["calls"], "give a list of objects with messages and response")
            alone = not given and "episode_id" not in data
            require(alone, "calls", show(data["calls"]), "leave out other messages, and episode_id")
            episode = self._episode(number, data, "id")
            for index, call in enumerate(data["calls"]):
                with _at(f"calls[{index}]: "):
                    self._add_call(episode, {"tools": data.get("tools"), **_present(call)})
        elif "episode_id" in data:
            episode = self._episode(number, data, "episode_id")
            if given:
                self._add_call(episode, data)
        else:
            require(bool(given), "messages", None, "give the conversation as messages, or requests as calls")
            is_whole = not given & (_ANSWERED | {"request"})
            require(is_whole, "episode_id", None, "a call has one, an episode on one line has messages")
            self._add_conversation(self._episode(number, data, "id"), data)

    def _episode(self, number: int, data: Mapping[str, Any], named: str) -> _Episode:
        """Return the episode of a line, with the line's result. `named`: the field with its name."""
        value = data.get("task_id", data.get("task"))
        is_id = isinstance(value, (str, int, Mapping)) and not isinstance(value, bool)
        require(is_id, "task_id", value, "give the episodes of a task, which are compared, the same text or number")
        reward, success = data.get("reward"), data.get("success", True)
        require(reward is None or is_of_kind(reward, float), "reward", reward, "give a finite number, or null")
        require(isinstance(success, bool), "success", success, "give true or false, or leave it out")
        task_id = value if isinstance(value, str) else to_json(value, sort_keys=True)
        name = str(data[named]) if named in data else number  # a text is never equal to a number
        is_new = (task_id, name) not in self.episodes
        require(is_new or named != "id", "id", name, "an earlier line has it, give each episode its own, or none")
        episode = self.episodes.setdefault((task_id, name), _Episode(task_id, name, number))
        if isinstance(data.get("task"), str):
            episode.task = data["task"]
        episode.add_result(data)
        return episode

    def _add_conversation(self, episode: _Episode, data: Mapping[str, Any]) -> None:
        instructions, messages = self._request(data)
        messages = normalize_messages([*instructions, *messages])
        end = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                end = index + 1
                if index > 0:  # one at the beginning answers no request
                    self._add_step(episode, messages[:index], data.get("tools"), message)
        episode.final = as_text(messages[end:]) or None

    def _add_call(self, episode: _Episode, call: dict[str, Any]) -> None:
        call = {**_present(call.get("request")), **call}
        for name, names in (("messages", {"messages", "input"}), ("response", _ANSWERED)):
            require(bool(names & call.keys()), name, None, "a call has messages and response")
        response = call.get("response", call.get("output"))
        if isinstance(response, list):  # of OpenAI's Responses, with its id beside it
            response = {"output": response, "id": call.get("id")}
        message, is_cut = self._answer(response)
        instructions, messages = self._request(call)
        if (after := call.get("previous_response_id")) is not None:
            if after not in episode.responses:
                self.skipped.add("an earlier response, which is not in the log")
            messages = [*episode.responses.get(after, ()), *messages]
        if isinstance(response, Mapping) and "output" in response:
            episode.responses[response.get("id")] = [*messages, message]
        self._add_step(episode, normalize_messages([*instructions, *messages]), call.get("tools"), message, is_cut)

    def _request(self, data: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
        """Return a request's instructions, which later requests do not continue, and its messages."""
        if "input" not in data:
            return [], self.skipped.without(anthropic.read_messages(data, self.skipped), "messages")
        items = openai_responses.read_items(data["input"], self.skipped)
        return openai_responses.read_instructions(data), self.skipped.without(items, "input")

    def _answer(self, response: Any) -> tuple[Message, bool]:
        """Return the assistant's message in a response, and whether it was cut."""
        body = response if isinstance(response, Mapping) else {"content": response}
        if "output" in body:
            field, is_cut = "input", body.get("status") == "incomplete"
            read = openai_responses.read_items(body["output"], self.skipped)
            messages = [{"role": "assistant", "content": ""}, *(one for one in read if one["role"] == "assistant")]
        else:
            choices = body.get("choices")
            choice = _present(choices[0]) if isinstance(choices, list) and len(choices) == 1 else body
            field, message = "messages", choice.get("message", choice)
            is_cut = choice.get("finish_reason") == "length" or body.get("stop_reason") == "max_tokens"
            is_message = isinstance(message, Mapping) and message.keys() & {"role", "content", "tool_calls"}
            is_answer = is_message and message.get("role", "assistant") == "assistant"
            require(is_answer, "response", show(response), "give the assistant's message, or the whole response")
            messages = anthropic.read_messages({"messages": [{**message, "role": "assistant"}]}, self.skipped)
        return normalize_messages(self.skipped.without(messages[-1:], field))[0], is_cut

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
            return state_key_text(self.state_key(request))
        except Exception as error:
            raise G2POError(f"state_key raised {type(error).__name__}: {error}", "state_key") from error

    def finish(self) -> Traces:
        groups: dict[str, list[Trajectory]] = {}
        for episode in self.episodes.values():
            with _at(f"line {episode.line}: "):
                trajectory = episode.trajectory()
            self.traces.without_calls += not episode.steps
            if episode.steps:
                group = groups.setdefault(episode.task_id, [])
                trajectory.group = group[0].group if group else len(groups) - 1
                group.append(trajectory)
        self.traces.groups = list(groups.values())
        return self.traces
