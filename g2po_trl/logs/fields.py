"""Fields of a log line other than requests and responses: the task, the result, and their episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..prompts.conversation import Message
from ..trajectory import Step, Trajectory
from ..utils.options import is_of_kind
from ..utils.show import show

COMMON = {"task_id", "task", "reward", "success", "tools"}


@dataclass
class Episode:
    """An episode whose lines are being read. `reward`, `success`: `None` if not given so far.

    `responses` are the conversations that a later request may continue, by the id of their last response.
    """

    task_id: str
    name: str | int
    line: int
    task: str | None = None
    steps: list[Step] = field(default_factory=list)
    final: str | None = None
    has_reward: bool = False
    reward: float | None = None
    success: bool | None = None
    responses: dict[str, list[Message]] = field(default_factory=dict)

    def set_result(self, data: Mapping[str, Any]) -> None:
        """Set reward and success from a line. Raises `ValueError` if an earlier line has different ones."""
        if "reward" not in data and "episode_id" not in data:
            raise ValueError("reward is missing; give the episode's total reward, or null if it has no result")
        self.has_reward |= "reward" in data
        for name in ("reward", "success"):
            value, before = data.get(name), getattr(self, name)
            if value is not None and before not in (None, value):
                raise ValueError(
                    f"{name} is {value}, but {before} on an earlier line of the same episode; it is the whole "
                    "episode's: give it on one line, or the same on all"
                )
            setattr(self, name, before if value is None else value)

    def trajectory(self) -> Trajectory:
        """Return the episode as a trajectory, without a result if its reward is null."""
        info = {"episode": self.name, "line": self.line}
        facts: dict[str, Any] = {"final_observation": self.final, "info": info, "task": self.task}
        if self.reward is None:
            return Trajectory(self.task_id, self.steps, 0.0, "error", error="its reward is null", **facts)
        reward = float(self.reward)
        succeeded = reward > 0 if self.success is None else self.success
        return Trajectory(self.task_id, self.steps, reward, "success" if succeeded else "failure", **facts)


def check_fields(data: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a value that its field does not take."""
    for name, (fits, remedy) in _FIELDS.items():
        if name in data and not fits(data[name]):
            raise ValueError(f"{name} is {show(data[name])}; give {remedy}")


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _are_tools(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # -> whether a value is one, and what to give instead
    "reward": (
        lambda one: one is None or is_of_kind(one, float),
        "a finite number, or null for an episode without a result",
    ),
    "success": (lambda one: one is None or isinstance(one, bool), "true or false, or leave it out"),
    "tools": (_are_tools, "a list of JSON schemas, or leave it out"),
    "calls": (lambda one: isinstance(one, (list, tuple)), "a list of objects with messages and response"),
    "request": (lambda one: isinstance(one, Mapping), "the body of the request"),
    "id": (lambda one: one is None or _is_name(one), "a text or a whole number"),
    "episode_id": (_is_name, "a text or a whole number"),
}


def task_of(data: Mapping[str, Any]) -> tuple[str, str | None]:
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
