"""A run or an evaluation as text, for terminals of machines without a browser."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ..utils.options import require
from ..utils.show import one_line, printable
from .data import Run
from .episode_sets import Evaluation
from .words import NOTHING

SMOOTHED = 5  # iterations of a mean, as in the page
STEPS = 60  # of an episode that are shown, half of them from its end
OBSERVATION = 12  # lines of an observation that are shown
ENDS = {"success": "solved", "failure": "failed", "truncated": "out of turns", "lost": "lost with its worker"}
_MARKS = {"success": ("good", "█"), "error": ("bad", "!"), "lost": ("bad", "!")}  # else failed
_WHY = {"limit": " (turn limit)", "fault": " (fault)", "return": " (back in an earlier state)"}
_CODES = {"good": "32", "bad": "31", "soft": "2", "bold": "1"}


class TerminalView:
    """A run or an evaluation (see `open_folder`) as text in lines of at most `width`, with ANSI codes if `colour`."""

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
            parts += ["\n".join(self._wrap(data["verdict"], ""))] if data["verdict"] else []
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
        evaluated = [one for one in overview["evaluations"] if one.get("success_rate") is not None]
        rates |= {f"evaluation {one.get('name', 'eval')!r}": one["success_rate"] for one in evaluated}
        line = ", ".join(f"{name} {100 * rate:.1f} %" for name, rate in rates.items())
        return [textwrap.fill(f"Success: {line}", self.width)] if rates else []

    def _groups(self, where: str, what: str, groups: Sequence[dict[str, Any]], texts: Sequence[str]) -> str:
        """Return a line for each group: one character per episode, successes, the task, whether it has a signal."""
        ends = [[one["outcome"] for one in group["episodes"]] for group in groups]
        counted = [end for of_group in ends for end in of_group if end not in ("error", "lost")]
        rate = 100 * counted.count("success") / max(1, len(counted))
        lines = [f"{where}: {rate:.1f} % of {len(counted)} episodes solved"]
        alike = len(groups) > 1 and len({group["task"] for group in groups}) == 1  # then ids tell tasks apart
        for number, (group, of_group) in enumerate(zip(groups, ends), 1):
            marks = "".join(self._paint(*_MARKS.get(end, ("bad", "·"))) for end in of_group)
            score = f"{of_group.count('success')}/{len(of_group)}"
            score = f" {score}  {'(no learning signal) ' if group.get('nothing') else ''}"
            row = None if group["row"] is None else texts[group["row"]]
            name = (None if alike else group["task"]) or row or f"{what} {group['id']}"
            lines.append(f"{number:>4} {marks}{score}{one_line(name, self.width - 5 - len(of_group) - len(score))}")
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
            *self._wrap(_turning_points(one), "  "),
        ]
        steps = [self._step(place, step, one, texts) for place, step in enumerate(one["steps"])]
        if len(steps) > STEPS:
            note = self._paint("soft", f"     ({len(steps) - STEPS} steps are left out)")
            steps[STEPS // 2 : -STEPS // 2] = [note]
        final = "" if one["final"] is None else texts[one["final"]]
        end = self._wrap(one["error"], "     ") if one["error"] else self._observation(final)
        return "\n".join([*lines, *steps, *end])

    def _step(self, place: int, step: dict[str, Any], one: dict[str, Any], texts: Sequence[str]) -> str:
        faults = {
            "invalid": not step["ok"],
            "not admissible": step["ok"] and step["in"] is False,
            "turning point": one.get("turns") and one["turns"][0]["step"] == place,
            "turn limit": one["outcome"] == "truncated" and place == len(one["steps"]) - 1,
        }
        fault = "".join(f" [{name}]" for name, holds in faults.items() if holds)
        worth = "" if step.get("trained") is None else f"  advantage {step['trained']:+.2f}"
        action = one_line(step["a"], self.width - 7 - len(fault) - len(worth))
        action = f"     → {action}{self._paint('bad', fault)}{self._paint('soft', worth)}"
        first, *others = self._observation(texts[step["o"]]) or [f"     {NOTHING}"]
        return "\n".join([f"{place + 1:>3}. {first[5:]}", *others, action])

    def _observation(self, text: str) -> list[str]:
        """Return the indented lines of an observation, cut if there are many."""
        lines = [part for line in text.split("\n") for part in self._wrap(line, "     ")]
        if len(lines) > OBSERVATION:
            lines[OBSERVATION - 1 :] = ["     …"]
        return lines

    def _wrap(self, text: str, indent: str) -> list[str]:
        return textwrap.wrap(printable(text), self.width, initial_indent=indent, subsequent_indent=indent)

    def _paint(self, kind: str, text: str) -> str:
        return f"\033[{_CODES[kind]}m{text}\033[0m" if self.colour and text else text


def _turning_points(one: dict[str, Any]) -> str:
    """Return where a failed episode of a training run lost most value; "" if it is unknown."""
    said = []
    for turn in one.get("turns", []) if one["outcome"] != "success" else []:
        values = f", V {turn['from']:.1f} to {turn['to']:.1f}" if "from" in turn else ""
        said.append(f"step {turn['step'] + 1}{values}{_WHY.get(turn['why'], '')}")
    return f"Turning point: {'; before it '.join(said)}" if said else ""


def _telling(groups: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return a failed episode of a group that also has a success, or else any failed one, or the first."""
    found = []
    for number, group in enumerate(groups, 1):
        wins = [one["outcome"] == "success" for one in group["episodes"]]
        found += [(0 if won else 1 + any(wins), (number, place)) for place, won in enumerate(wins, 1)]
    return max(found, key=lambda one: one[0])[1]
