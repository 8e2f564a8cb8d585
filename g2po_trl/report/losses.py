"""Failures of a run: tasks that are never solved, and the steps after which failed episodes hardly could succeed.

The *turning point* of a failed episode is its step with the largest fall of the state's value, V(next) - V(state), in
a group with a success: before it the other episodes of the group succeeded often, and after it they did not.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..credit.graph import StateGraph
from ..credit.turning import turning_steps
from ..runs.iterations import Iteration
from ..trajectory import Trajectory, is_whole
from ..utils.json import to_json
from ..utils.show import one_line, printable
from ..view.words import action_text, state_text

SHOWN = 5  # tasks and turning points
TEXT = 60  # characters of a state or an action
TURN_LIMIT = "the turn limit"
UNBROKEN = "\N{NO-BREAK SPACE}"  # in a command, which is copied from one line


def losses(iterations: Sequence[Iteration], gamma: float) -> dict[str, Any]:
    """Return the part `losses` of analysis.json.

    Returns:
        `tasks`: number of tasks with a result. `never_won`: the tasks without a success, most episodes first:
        `task_id`, `name` in words (the row or the id where all tasks have the same words), `row`, `episodes`, `ends`
        (pairs of a state's text, or of why there was no step, and the number of episodes that end there, most first),
        and `iteration` and `episode` of one of them, for `g2po view --text`. `lost`: number of failed episodes in
        groups with a success. `turning_points` of these: `state`, `action` (or `TURN_LIMIT`) and number of `episodes`,
        most first.
    """
    by_task: dict[str, list[tuple[Trajectory, int, str]]] = defaultdict(list)
    turns: Counter[tuple[str, str]] = Counter()
    texts: dict[str, str] = {}
    lost = 0
    for iteration in iterations:
        for number, group in enumerate(iteration.groups, 1):
            for index, episode in enumerate(group, 1):
                if episode.counted:
                    by_task[episode.task_id].append((episode, iteration.number, f"{number}.{index}"))
            if not any(episode.success for episode in group):
                continue
            lost += sum(episode.counted and not episode.success for episode in group)
            for episode, index in turning_points(group, gamma):
                step = episode.steps[index]
                texts.setdefault(step.key, one_line(state_text(step), TEXT))
                is_cut = episode.outcome == "truncated" and index == len(episode.steps) - 1
                turns[step.key, TURN_LIMIT if is_cut else one_line(action_text(step), TEXT)] += 1
    shown = turns.most_common(SHOWN)
    states = _told_apart(texts, [key for (key, _), _ in shown])
    alike = len(by_task) > 1 and len({played[0][0].task for played in by_task.values()}) == 1
    never = [name for name, played in by_task.items() if not any(one.success for one, *_ in played)]
    never.sort(key=lambda name: -len(by_task[name]))
    points = [{"state": states[key], "action": action, "episodes": number} for (key, action), number in shown]
    never_won = [_lost_task(name, by_task[name], alike) for name in never]
    return {"tasks": len(by_task), "never_won": never_won, "lost": lost, "turning_points": points}


def turning_points(group: Sequence[Trajectory], gamma: float) -> list[tuple[Trajectory, int]]:
    """Return the failed episodes of a group, each with the index of the step after which V falls most."""
    steps = turning_steps(StateGraph.from_groups([group], gamma))
    return [(one, int(step)) for one, step in zip(group, steps) if step >= 0 and not one.success]


def in_short(found: dict[str, Any], folder: str | None = None) -> str:
    """Return sentences for the line on failures; "" if there are none. `folder`: the run's, for `g2po view`."""
    sentences = []
    for first in found["never_won"][:1]:
        view = "" if folder is None else f"; {_view(first, folder)}".replace(" ", UNBROKEN)
        number = f"{len(found['never_won'])} of {found['tasks']} tasks are never solved"
        sentences.append(f"{number}, for example {first['name']!r} in {first['episodes']} episodes{view}.")
    for first in found["turning_points"][:1]:
        most = "Most" if 2 * first["episodes"] > found["lost"] else "Many"
        by = first["action"] if first["action"] == TURN_LIMIT else repr(first["action"])
        where = f"come after {first['state']!r} by {by} ({first['episodes']} of {found['lost']})"
        sentences.append(f"{most} failures in groups with a success {where}.")
    return " ".join(sentences)


def text(found: dict[str, Any], folder: str) -> str:
    """Return the lines of `--details`."""
    lines = [f"never solved: {len(found['never_won'])} of {found['tasks']} tasks"]
    for one in found["never_won"][:SHOWN]:
        lines.append(f"  {one['name']}: {one['episodes']} episodes; {_view(one, folder)}")
        if one["row"] is not None and is_whole(one["row"]):
            lines.append(f"    task {printable(to_json(one['row']))[:400]}")
        lines += [f"    {number} end in {state!r}" for state, number in one["ends"]]
    if found["turning_points"]:
        lines.append(f"where {found['lost']} failed episodes of groups with a success lose most of the state's value:")
    for one in found["turning_points"]:
        lines.append(f"  {one['episodes']:>4} after {one['state']!r} by {one['action']}")
    return "\n".join(lines)


def _lost_task(name: str, played: Sequence[tuple[Trajectory, int, str]], alike: bool) -> dict[str, Any]:
    ended = [  # pairs of key and text
        (one.steps[-1].key, state_text(one.steps[-1])) if one.steps else (None, f"no step: {one.failure_reason}")
        for one, *_ in played
    ]
    ends = Counter(key for key, _ in ended).most_common(2)
    states = _told_apart({key: one_line(text, TEXT) for key, text in ended}, [key for key, _ in ends])
    last, iteration, place = played[-1]
    words = (name if last.row is None else to_json(last.row)) if alike or not last.task else last.task
    return {
        "task_id": name,
        "name": one_line(words, TEXT),
        "row": last.row,
        "episodes": len(played),
        "ends": [[states[key], number] for key, number in ends],
        "iteration": iteration,
        "episode": place,
    }


def _told_apart(texts: Mapping[str | None, str], keys: Iterable[str | None]) -> dict[str | None, str]:
    """Return the texts of these states; to equal texts, the part of the key that differs is added."""
    said = {key: texts[key] for key in keys}
    told = dict(said)
    for key, text in said.items():
        others = [os.path.commonprefix([str(key), str(one)]) for one in said if one != key and said[one] == text]
        if others:
            start = max(0, max(map(len, others)) - TEXT // 2)
            told[key] = f"{text} (key {'…' * (start > 0)}{one_line(str(key)[start:], TEXT)})"
    return told


def _view(task: dict[str, Any], folder: str) -> str:
    return f"g2po view {shlex.quote(folder)} --text --episode {task['episode']} --iterations {task['iteration']}"
