"""A run or an evaluation as text, for terminals of machines without a browser."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ..utils.options import require
from ..utils.show import one_line, printable
from .data import Run
from .episode_sets import Evaluation

SMOOTHED = 5  # iterations of a mean, as in the page
STEPS = 60  # of an episode that are shown, half of them from its end
OBSERVATION, BOARD = 3, 14  # lines of an observation that are shown; of one that is a board
ENDS = {"success": "solved", "failure": "failed", "truncated": "out of turns", "lost": "lost with its worker"}
_MARKS = {"success": ("good", "█"), "error": ("bad", "!"), "lost": ("bad", "!")}  # else failed
_CODES = {"good": "32", "bad": "31", "soft": "2", "bold": "1"}


class TerminalView:
    """A run or an evaluation as text.

    Args:
        source: see `open_folder`.
        width: maximum number of characters per line.
        colour: whether to use ANSI codes.
    """

    def __init__(self, source: Run | Evaluation, width: int = 80, colour: bool = False):
        self.source, self.width, self.colour = source, max(40, width), colour

    def text(self, iteration: int | None = None, episode: tuple[int, int] | None = None) -> str:
        """Return success by iteration, the groups of an iteration or the tasks of an evaluation, and an episode.

        `iteration` is the last one by default; `episode`, group (or task) and episode in it from 1, is a failed
        one of a group that also has a success. Raises `ValueError` if there is no such episode.
        """
        parts = [self._paint("bold", self.source.name)]
        if self.source.numbers:
            latest = self.source.numbers[-1]
            parts += self._success(self.source.overview())
            data = self.source.iteration(iteration or latest, prompts=False)
            groups, what = [{**group, "episodes": group["trajectories"]} for group in data["groups"]], "group"
            where = f"Iteration {data['n']}" + ("" if data["n"] == latest else f" of {latest}")
        else:
            *_, last = self.source.sets()
            data = last.data(prompts=False)
            groups, what = data["tasks"], "task"
            where = f"Evaluation {last.panel}" + ("" if last.step is None else f", step {last.step}")
        parts.append(self._groups(where, what, groups, data["texts"]))
        if any(group["episodes"] for group in groups):
            parts.append(self._episode(where, groups, data["texts"], *(episode or _telling(groups))))
        return "\n\n".join(parts)

    def _success(self, overview: dict[str, Any]) -> list[str]:
        """Return the last rates of success, of training and of each evaluation set."""
        curve = [one["success"] for one in overview["curves"] if "success" in one][-SMOOTHED:]
        rates = {f"last {len(curve)} iterations": sum(curve) / len(curve)} if curve else {}
        for one in overview["evaluations"]:
            if one.get("success_rate") is not None:
                rates[f"evaluation {one.get('name', 'eval')!r}"] = one["success_rate"]
        line = ", ".join(f"{name} {100 * rate:.1f} %" for name, rate in rates.items())
        return [textwrap.fill(f"Success: {line}", self.width)] if rates else []

    def _groups(self, where: str, what: str, groups: Sequence[dict[str, Any]], texts: Sequence[str]) -> str:
        """Return a line for each group: one character per episode, successes, the task, whether it taught nothing."""
        ends = [one["outcome"] for group in groups for one in group["episodes"]]
        counted = [end for end in ends if end not in ("error", "lost")]
        rate = 100 * counted.count("success") / max(1, len(counted))
        solved = f"{rate:.1f} % of {len(counted)} episodes solved" if counted else "no episode with a result"
        lines = [f"{where}: {solved}"]
        alike = len(groups) > 1 and len({group["task"] for group in groups}) == 1  # then ids tell tasks apart
        for number, group in enumerate(groups, 1):
            ends = [one["outcome"] for one in group["episodes"]]
            marks = "".join(self._paint(*_MARKS.get(end, ("bad", "·"))) for end in ends)
            start = f"{number:>4} "
            score = f" {ends.count('success')}/{len(ends)}  {'(taught nothing) ' if group.get('nothing') else ''}"
            row = None if group["row"] is None else texts[group["row"]]
            name = (None if alike else group["task"]) or row or f"{what} {group['id']}"
            room = self.width - len(start) - len(ends) - len(score)
            lines.append(f"{start}{marks}{score}{one_line(name, room)}")
        return "\n".join(lines)

    def _episode(
        self, where: str, groups: Sequence[dict[str, Any]], texts: Sequence[str], number: int, place: int
    ) -> str:
        """Return an episode: its observations and actions."""
        exists = 1 <= number <= len(groups) and 1 <= place <= len(groups[number - 1]["episodes"])
        remedy = f"{where} has {len(groups)} groups, choose one of their episodes"
        require(exists, "episode", f"{number}.{place}", remedy)
        group, one = groups[number - 1], groups[number - 1]["episodes"][place - 1]
        end = self._paint("good" if one["outcome"] == "success" else "bad", ENDS.get(one["outcome"], one["outcome"]))
        lines = [
            f"Episode {number}.{place}: {end}, reward {one['reward']:g}, {len(one['steps'])} steps",
            self._paint("soft", "(another: --episode GROUP.EPISODE)"),
            *self._wrap(group["task"] or "", "  "),
            *self._wrap(self._turning_points(one), "  "),
        ]
        left_out = range(STEPS // 2, len(one["steps"]) - STEPS // 2)
        for i, step in enumerate(one["steps"], 1):
            if i - 1 in left_out:
                if i - 1 == left_out[0]:
                    lines.append(self._paint("soft", f"     ({len(left_out)} steps are left out)"))
                continue
            observation = self._observation(texts[step["o"]])
            lines += [f"{i:>3}. {observation[0]}", *(f"     {line}" for line in observation[1:])]
            faults = {
                "invalid": not step["ok"],
                "not admissible": step["ok"] and step["in"] is False,
                "turning point": one.get("turns") and one["turns"][0]["step"] == i - 1,
                "turn limit": one["outcome"] == "truncated" and i == len(one["steps"]),
            }
            fault = "".join(f" [{name}]" for name, holds in faults.items() if holds)
            advantage = step.get("trained")
            worth = "" if advantage is None else f"  advantage {advantage:+.2f}"
            action = one_line(step["a"], self.width - 7 - len(fault) - len(worth))
            lines.append(f"     → {action}{self._paint('bad', fault)}{self._paint('soft', worth)}")
        if one["error"]:
            lines += self._wrap(one["error"], "     ")
        elif one["final"] is not None:
            lines += [f"     {line}" for line in self._observation(texts[one["final"]])]
        return "\n".join(lines)

    def _turning_points(self, one: dict[str, Any]) -> str:
        """Return where a failed episode of a training run lost most value; "" if it is unknown."""
        turns = [] if one["outcome"] == "success" else one.get("turns", [])
        said = []
        for turn in turns:
            values = f", V {turn['from']:.1f} to {turn['to']:.1f}" if "from" in turn else ""
            why = {"limit": " (turn limit)", "fault": " (fault)", "return": " (back in an earlier state)"}
            said.append(f"step {turn['step'] + 1}{values}{why.get(turn['why'], '')}")
        return f"Turning point: {'; before it '.join(said)}" if said else ""

    def _observation(self, text: str) -> list[str]:
        """Return the lines of an observation: a board at its beginning unchanged, the rest wrapped and cut."""
        room, lines = self.width - 5, printable(text).strip("\n").split("\n")
        height = next((i for i, line in enumerate(lines) if len(line) != len(lines[0])), len(lines))
        height = height if height > 2 and len(lines[0]) <= room else 0
        board, lines = lines[:height][:BOARD], lines[height:]
        wrapped = [part for line in lines if line.strip() for part in textwrap.wrap(line, room)]
        if len(wrapped) > OBSERVATION:
            wrapped = [*wrapped[: OBSERVATION - 1], one_line(wrapped[OBSERVATION - 1] + " …", room)]
        return [*board, *wrapped] or ["(nothing)"]

    def _wrap(self, text: str, indent: str) -> list[str]:
        return textwrap.wrap(printable(text), self.width, initial_indent=indent, subsequent_indent=indent)

    def _paint(self, kind: str, text: str) -> str:
        return f"\033[{_CODES[kind]}m{text}\033[0m" if self.colour and text else text


def _telling(groups: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return a failed episode of a group that also has a success, or else any failed one, or the first."""
    found = []
    for number, group in enumerate(groups, 1):
        wins = [one["outcome"] == "success" for one in group["episodes"]]
        found += [(0 if won else 1 + any(wins), (number, place)) for place, won in enumerate(wins, 1)]
    return max(found, key=lambda one: one[0])[1]
