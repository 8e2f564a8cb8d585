"""Logged runs of an agent as trajectories: each call of its model is a step.

A line of a log is a JSON object in one of three forms, told apart by its fields:

- `{"task_id", "reward", "messages"}`: an episode. Each message of the assistant is a call, and its request is the
  messages before it.
- `{"task_id", "reward", "calls": [{"messages", "response"}, …]}`: an episode of an agent that rewrites its history.
- `{"task_id", "episode_id", "messages", "response"}`: a call. `reward` is on at least one line of the episode.

Optional are `success`, `tools` (of an episode or of a call) and, of an episode, `id`; `task` may stand for `task_id`.
A reward of `null` is no result.
Messages and tools are as in OpenAI's chat completions. A `response` is the message or the whole chat completion.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..prompts.conversation import (
    Message,
    as_text,
    message_text,
    normalize_messages,
    response_action,
    since_last_completion,
)
from ..prompts.state_keys import request_key, state_key_text
from ..trajectory import Step, Trajectory
from ..utils.json import json_values
from ..utils.show import show

StateKey = Callable[[list[Message]], Any]
Tools = Sequence[Mapping[str, Any]] | None
_COMMON = {"task_id", "task", "reward", "success", "tools"}
_CONVERSATION, _CALLS, _CALL = {"messages", "id"}, {"calls", "id"}, {"messages", "response", "episode_id"}


@dataclass
class Traces:
    """The trajectories of a log, and what was left out of them.

    Args:
        groups: for each task, in order of appearance, its trajectories. `info` has `episode`: its id, or else the
            number of its line, and `line`: its first line.
        without_calls: number of episodes without a call, which are left out.
        unread: field that was not read -> number of times.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    without_calls: int = 0
    unread: Counter[str] = field(default_factory=Counter)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [trajectory for group in self.groups for trajectory in group]


def trajectories_of_traces(
    lines: Iterable[str | bytes | Mapping[str, Any]], state_key: StateKey | None = None
) -> Traces:
    """Return the trajectories of the lines of a log.

    Args:
        lines: JSON texts or the objects themselves, in any mixture of the three forms; blank lines are skipped.
        state_key: `messages of a request -> text or JSON data`, equal for equal states. `None`: what came since the
            last completion, and who is asked (`request_key`).

    Raises:
        ValueError: for a line in none of the forms, and if `state_key` raises an error or returns `None`; the message
            names line, field and remedy.
    """
    return _read(enumerate(lines, 1), state_key)


def trajectories_of_file(path: str | Path, state_key: StateKey | None = None) -> Traces:
    """Return the trajectories of a log in a file: JSON Lines, an array, or objects over several lines.

    For arguments and errors see `trajectories_of_traces`.
    """
    with Path(path).open("rb") as file:
        return _read(json_values(file), state_key)


def _read(numbered: Iterable[tuple[int, Any]], state_key: StateKey | None) -> Traces:
    reader = _Reader(state_key)
    for number, line in numbered:
        if isinstance(line, (str, bytes)) and not line.strip():
            continue
        try:
            reader.read(number, line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return reader.finish()


@dataclass
class _Episode:
    """An episode of which lines are still read. `reward`, `success`: `None` if not given so far."""

    task_id: str
    name: str | int
    line: int
    task: str | None = None
    steps: list[Step] = field(default_factory=list)
    final: str | None = None
    has_reward: bool = False
    reward: float | None = None
    success: bool | None = None


class _Reader:
    def __init__(self, state_key: StateKey | None):
        self.state_key = state_key
        self.episodes: dict[tuple[str, str | int], _Episode] = {}
        self.found = Traces()

    def read(self, number: int, line: str | bytes | Mapping[str, Any]) -> None:
        data = line if isinstance(line, Mapping) else _parse(line)
        form = _form_of(data)
        _check_fields(data)
        self.found.unread.update(data.keys() - form - _COMMON)
        episode = self._episode(number, data, form)
        _set_reward(episode, data)
        if form is _CALL:
            self._add_call(episode, data)
        elif form is _CALLS:
            for place, call in enumerate(data["calls"]):
                with_place = f"calls[{place}]"
                if not isinstance(call, Mapping) or not {"messages", "response"} <= call.keys():
                    raise ValueError(f"{with_place} is {show(call)}; give an object with messages and response")
                self.found.unread.update(f"calls.{name}" for name in call.keys() - _CALL - {"tools"})
                self._add_call(episode, {"tools": data.get("tools"), **call}, f"{with_place}.")
        else:
            self._add_conversation(episode, normalize_messages(data["messages"]), data.get("tools"))

    def _episode(self, number: int, data: Mapping[str, Any], form: set[str]) -> _Episode:
        task_id, task = _task_of(data)
        name = data.get("episode_id" if form is _CALL else "id")
        name = number if name is None else str(name)  # a text is never equal to the number of a line
        known = self.episodes.get((task_id, name))
        if known is not None and form is not _CALL:
            raise ValueError(
                f"id is {show(name)}, as on line {known.line} of the same task: give each episode a different id, "
                "or none"
            )
        episode = known or _Episode(task_id, name, number)
        episode.task = episode.task or task
        self.episodes[task_id, name] = episode
        return episode

    def _add_conversation(self, episode: _Episode, messages: list[Message], tools: Tools) -> None:
        end = 0
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            end = place + 1
            if place > 0:  # one at the beginning answers no request
                self._add_step(episode, messages[:place], tools, message)
        episode.final = as_text(messages[end:]) or None

    def _add_call(self, episode: _Episode, call: Mapping[str, Any], where: str = "") -> None:
        try:
            request = normalize_messages(call["messages"])
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
        _check_fields({"tools": call.get("tools")})
        self._add_step(episode, request, call.get("tools"), *_response_of(call["response"], f"{where}response"))

    def _add_step(
        self, episode: _Episode, request: list[Message], tools: Tools, message: Message, is_cut: bool = False
    ) -> None:
        news = since_last_completion(request)
        key = request_key(request, tools) if self.state_key is None else self._own_key(request)
        completion = "\n\n".join(filter(None, [message.get("reasoning_content"), message_text(message)]))
        episode.steps.append(
            Step(
                as_text(news or request),
                response_action(message),
                state_key=key,
                completion=completion,
                completion_truncated=is_cut,
                messages=news or request,
            )
        )

    def _own_key(self, request: list[Message]) -> str:
        try:
            key = self.state_key(request)
        except Exception as error:
            raise ValueError(f"state_key raised {type(error).__name__}: {error}") from error
        return state_key_text(key)

    def finish(self) -> Traces:
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
            groups.setdefault(episode.task_id, []).append(_trajectory_of(episode))
        self.found.groups = list(groups.values())
        for number, trajectory in ((n, t) for n, group in enumerate(self.found.groups) for t in group):
            trajectory.group = number
        return self.found


def _parse(line: Any) -> Mapping[str, Any]:
    try:
        data = json.loads(line) if isinstance(line, (str, bytes)) else line
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}); write one object a line") from error
    if not isinstance(data, dict):
        raise ValueError(f"{show(data)} is not a JSON object; write one per line, with task_id, reward and messages")
    return data


def _form_of(data: Mapping[str, Any]) -> set[str]:
    """Return the fields of the line's form beside the common ones."""
    if "calls" in data:
        if wrong := sorted(data.keys() & {"messages", "response", "episode_id"}):
            raise ValueError(f"there are both calls and {', '.join(wrong)}; an episode on one line has calls and id")
        return _CALLS
    if "messages" not in data:
        raise ValueError(
            f"there is neither messages nor calls among the fields {', '.join(map(str, data)) or '(none)'}; give the "
            "conversation as messages, or the requests and responses as calls"
        )
    if "response" in data or "episode_id" in data:
        missing = next((name for name in ("response", "episode_id") if name not in data), None)
        if missing:
            raise ValueError(
                f"{missing} is missing; a call has messages, response and episode_id, an episode on one line has "
                "messages and id"
            )
        return _CALL
    return _CONVERSATION


def _check_fields(data: Mapping[str, Any]) -> None:
    for name, (fits, remedy) in _FIELDS.items():
        if name in data and not fits(data[name]):
            raise ValueError(f"{name} is {show(data[name])}; give {remedy}")


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _are_tools(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # -> whether a value is one, and what to give instead
    "reward": (lambda one: one is None or _is_finite(one), "a finite number, or null for an episode without a result"),
    "success": (lambda one: one is None or isinstance(one, bool), "true or false, or leave it out"),
    "tools": (_are_tools, "a list of JSON schemas, or leave it out"),
    "calls": (lambda one: isinstance(one, (list, tuple)), "a list of objects with messages and response"),
    "id": (lambda one: one is None or _is_name(one), "a text or a whole number"),
    "episode_id": (_is_name, "a text or a whole number"),
}


def _task_of(data: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the task's id and its words, if it has any."""
    name = "task_id" if data.get("task_id") is not None else "task"
    value, task = data.get(name), data.get("task")
    words = task if task is None or isinstance(task, str) else json.dumps(task, ensure_ascii=False)
    if value is None:
        raise ValueError("task_id is missing; give the episodes of a task, which are compared, the same task_id")
    if isinstance(value, str):
        return value, words
    if isinstance(value, bool) or not isinstance(value, (int, Mapping)):
        raise ValueError(f"{name} is {show(value)}; give a text or a whole number")
    return json.dumps(value, ensure_ascii=False, sort_keys=True), words


def _set_reward(episode: _Episode, data: Mapping[str, Any]) -> None:
    if "reward" not in data and "episode_id" not in data:
        raise ValueError("reward is missing; give the episode's total reward, or null if it has no result")
    episode.has_reward |= "reward" in data
    for name in ("reward", "success"):
        value, before = data.get(name), getattr(episode, name)
        if value is not None and before not in (None, value):
            raise ValueError(
                f"{name} is {value}, but {before} on an earlier line of the same episode; it is the whole episode's: "
                "give it on one line, or the same on all"
            )
        setattr(episode, name, before if value is None else value)


def _response_of(response: Any, where: str) -> tuple[Message, bool]:
    """Return the assistant's message, and whether it reached the maximum length."""
    is_cut = False
    if isinstance(response, Mapping) and "choices" in response:
        choices = response["choices"]
        if not isinstance(choices, (list, tuple)) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            raise ValueError(f"{where}.choices is {show(choices)}; give the one choice that the agent used")
        is_cut, response = choices[0].get("finish_reason") == "length", choices[0].get("message")
    message = {"content": response} if isinstance(response, str) else response
    if not isinstance(message, Mapping) or message.get("role", "assistant") != "assistant":
        raise ValueError(f"{where} is {show(response)}; give the assistant's message, or the chat completion")
    try:
        return normalize_messages([{**message, "role": "assistant"}])[0], is_cut
    except ValueError as error:
        raise ValueError(str(error).replace("messages[0]", where, 1)) from error


def _trajectory_of(episode: _Episode) -> Trajectory:
    info = {"episode": episode.name, "line": episode.line}
    facts: dict[str, Any] = {"final_observation": episode.final, "info": info, "task": episode.task}
    if episode.reward is None:
        return Trajectory(episode.task_id, episode.steps, 0.0, "error", error="its reward is null", **facts)
    reward = float(episode.reward)
    succeeded = reward > 0 if episode.success is None else episode.success
    return Trajectory(episode.task_id, episode.steps, reward, "success" if succeeded else "failure", **facts)
