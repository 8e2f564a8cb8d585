"""The index of a run: its groups by task and iteration, the states and actions of episodes, and tool calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from ..runs.iterations import load_iteration, trajectory_files
from ..runs.metrics import success_error, wins
from ..runs.ownership import read_description
from ..runs.verdict import Tally, verdict
from ..trajectory import OUTCOMES, Step
from .texts import Texts, task_data
from .words import action_text, state_text

LONGEST = 160  # characters of a state or an action that can be searched
_NAME = re.compile(r'<tool_call>\s*\{[^{}]*?"name"\s*:\s*"([^"]*)"')


class EpisodeIndex:
    """Data by which a page finds an episode in the folder of a run; changed files are read again."""

    def __init__(self, folder: Path):
        self.folder, self._lock = folder, Lock()
        self._states, self._actions, self._places = Texts(), Texts(), Texts()
        self._tasks: dict[str, dict[str, Any]] = {}
        self._read: dict[int, tuple[Any, tuple[dict[str, Any], Tally]]] = {}

    def data(self, numbers: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the index of some iterations (`None`: all) as plain data.

        Of an iteration: "error" (see `success_error`), "tools" (see `_tools`), and "groups", each with "task", a
        position in "tasks", and "episodes": triples of positions in "outcomes", "states" and "actions". The texts have
        at most `LONGEST` characters. "verdict" on all: why there was nothing to learn from, and what to do; else "".
        """
        with self._lock:
            read = [self._iteration(n) for n in numbers or trajectory_files(self.folder)]
            iterations = [one for one, _ in read]
            found = {"tasks": list(self._tasks.values()), "states": self._states.all, "actions": self._actions.all}
        tally, estimator = Tally(), read_description(self.folder, "run.json").get("estimator", {})
        for _, counts in read:
            tally.update(counts)
        seen = verdict(tally, estimator.get("estimator_name", "g2po"))
        return {"outcomes": list(OUTCOMES), **found, "iterations": iterations, "verdict": str(seen or "")}

    def errors(self) -> dict[str, Any]:
        """Return only "n" and "error" of the iterations, for runs that are compared."""
        return {"iterations": [{"n": one["n"], "error": one["error"]} for one in self.data()["iterations"]]}

    def _iteration(self, number: int) -> tuple[dict[str, Any], Tally]:
        stats = [path.stat() for path in trajectory_files(self.folder).get(number, [])]
        mark = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        if number not in self._read or self._read[number][0] != mark:
            self._read[number] = mark, self._index(number)
        return self._read[number][1]

    def _index(self, number: int) -> tuple[dict[str, Any], Tally]:
        groups, calls = [], Counter()
        read = load_iteration(self.folder, number).groups
        for group in read:
            self._tasks.setdefault(group[0].task_id, task_data(group[0], str))
            place = self._places.number(group[0].task_id)
            episodes = []
            for trajectory in group:
                calls.update(call for step in trajectory.steps for call in _calls(step))
                states = [self._states.number(_searched(step)) for step in trajectory.steps]
                actions = [self._actions.number(action_text(step)[:LONGEST]) for step in trajectory.steps]
                episodes.append([OUTCOMES.index(trajectory.outcome), states, actions])
            groups.append({"task": place, "episodes": episodes})
        found = {"n": number, "groups": groups, "error": success_error(map(wins, read)), "tools": _tools(calls)}
        return found, Tally.of(read)


index_of = cache(EpisodeIndex)  # of a folder, the same whenever it is opened


def _searched(step: Step) -> str:
    text = state_text(step)
    return text[:LONGEST] if step.key == text else f"{text[:LONGEST]} {step.key[:LONGEST]}"


def _calls(step: Step) -> list[tuple[str | None, str | None]]:
    """Return name and kind (`Step.call`; `None` in runs of older versions) of a step's tool calls.

    A completion that was offered tools but has no call counts as one call without a name.
    """
    if step.messages is None:
        names = _NAME.findall(step.action)
    else:
        names = [call["function"]["name"] for call in step.response.get("tool_calls", ())]
    if not names and step.call is not None:
        names = [None if step.call == "none" else "(unreadable)"]
    return [(name, step.call) for name in names]


def _tools(calls: Counter[tuple[str | None, str | None]]) -> list[list[Any]]:
    """Return for each tool its name, calls, calls that could not be parsed, and calls of tools that do not exist."""
    known = {name for name, kind in calls if kind == "known"}
    table: dict[str | None, list[int]] = {}
    for (name, kind), number in calls.items():
        row = table.setdefault(name, [0, 0, 0])
        row[0] += number
        row[1] += number * (kind == "unreadable")
        row[2] += number * (kind == "unknown" and name not in known)  # of several calls, those to blame
    return [[name, *row] for name, row in sorted(table.items(), key=lambda one: -one[1][0])]
