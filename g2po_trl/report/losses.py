"""Failures of a run: tasks that are never solved, and the steps after which failed episodes hardly could succeed.

The *turning point* of a failed episode is its step with the largest fall of the state's value, V(next) - V(state), in
a group with a success: before it the other episodes of the group succeeded often, and after it they did not.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
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


def losses(iterations: Sequence[Iteration], graphs: Sequence[StateGraph]) -> dict[str, Any]:
    """Return the part `losses` of analysis.json. `graphs`: of each iteration.

    Returns:
        `tasks`: number of tasks with a result. `never_won`: the tasks without a success, most episodes first:
        `name` in words (the row or the id where all tasks have the same words), `row`, `episodes`, `ends` (pairs of a
        state's text, or of why there was no step, and the number of episodes that end there, most first), and
        `iteration` and `episode` of one of them, for `g2po view --text`. `lost`: number of failed episodes in groups
        with a success. `turning_points` of these: `state`, `action` (or `TURN_LIMIT`) and number of `episodes`, most
        first.
    """
    by_task: dict[str, list[tuple[Trajectory, int, str]]] = defaultdict(list)
    points: Counter[tuple[str, str]] = Counter()
    lost = 0
    for iteration, graph in zip(iterations, graphs):
        turns = iter(turning_steps(graph).tolist())
        for number, group in enumerate(iteration.groups, 1):
            has_success = any(episode.success for episode in group)
            for index, (episode, turn) in enumerate(zip(group, turns), 1):
                if not episode.counted:
                    continue
                by_task[episode.task_id].append((episode, iteration.number, f"{number}.{index}"))
                is_lost = has_success and not episode.success
                lost += is_lost
                points.update([_turning_point(episode, turn)] if is_lost and turn >= 0 else [])
    alike = len(by_task) > 1 and len({played[0][0].task for played in by_task.values()}) == 1
    never = [played for played in by_task.values() if not any(one.success for one, *_ in played)]
    shown = [{"state": state, "action": action, "episodes": n} for (state, action), n in points.most_common(SHOWN)]
    never_won = [_lost_task(played, alike) for played in sorted(never, key=len, reverse=True)]
    return {"tasks": len(by_task), "never_won": never_won, "lost": lost, "turning_points": shown}


def _turning_point(episode: Trajectory, turn: int) -> tuple[str, str]:
    """Return state and action of a step as texts."""
    step, is_cut = episode.steps[turn], episode.outcome == "truncated" and turn == len(episode.steps) - 1
    return one_line(state_text(step), TEXT), TURN_LIMIT if is_cut else one_line(action_text(step), TEXT)


def in_short(found: dict[str, Any], folder: str | None = None) -> str:
    """Return sentences for the line on failures; "" if there are none. `folder`: the run's, for `g2po view`."""
    sentences = []
    for first in found["never_won"][:1]:
        view = "" if folder is None else f"; {_view(first, folder)}".replace(" ", UNBROKEN)
        number = f"{len(found['never_won'])} of {found['tasks']} tasks are never solved"
        sentences.append(f"{number}, for example {first['name']!r} in {first['episodes']} episodes{view}.")
    for first in found["turning_points"][:1]:
        by = first["action"] if first["action"] == TURN_LIMIT else repr(first["action"])
        share = f"{first['episodes']} of {found['lost']} failures in groups with a success"
        sentences.append(f"{share} come after {first['state']!r} by {by}.")
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


def _lost_task(played: Sequence[tuple[Trajectory, int, str]], alike: bool) -> dict[str, Any]:
    ends = Counter(state_text(one.steps[-1]) if one.steps else f"no step: {one.failure_reason}" for one, *_ in played)
    last, iteration, place = played[-1]
    words = (last.task_id if last.row is None else to_json(last.row)) if alike or not last.task else last.task
    return {
        "name": one_line(words, TEXT),
        "row": last.row,
        "episodes": len(played),
        "ends": [[one_line(text, TEXT), number] for text, number in ends.most_common(2)],
        "iteration": iteration,
        "episode": place,
    }


def _view(task: dict[str, Any], folder: str) -> str:
    return f"g2po view {shlex.quote(folder)} --text --episode {task['episode']} --iterations {task['iteration']}"
