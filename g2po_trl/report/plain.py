"""A run in five plain lines: success, where groups fail, what recurs, the verdict, what to do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check.statistics import count_in_keys, returned_share
from ..credit.estimators.registry import row_of
from ..runs.iterations import Iteration
from ..runs.metrics import FEWEST, careful_error, error_of_share, wins
from ..runs.summary import before_and_after
from ..runs.verdict import Finding
from ..trajectory import Trajectory
from . import key_quality as keys
from . import losses

WINDOW = 5  # iterations at both ends of a run that are compared; fewer of a short run
WIDTH, INDENT = 110, 14
CLEAR = 2.0  # standard errors
_ENDS = {
    "truncated": "ran out of turns",
    "failure": "ended earlier",
    "error": "ended in an error",
    "lost": "were lost with a worker",
}


@dataclass(frozen=True)
class Success:
    """Success of some iterations: mean over groups, its standard error (nan: too few), and the iterations' numbers."""

    rate: float
    error: float
    first: int
    last: int

    @property
    def where(self) -> str:
        return f"iteration {self.first}" if self.first == self.last else f"iterations {self.first} to {self.last}"

    def __str__(self) -> str:
        return f"{100 * self.rate:.1f} % in {self.where}"


@dataclass(frozen=True)
class Change:
    """A change of success in [-1, 1], its standard error, and its source."""

    points: float
    error: float
    of: str

    @property
    def is_clear(self) -> bool:
        return abs(self.points) > CLEAR * self.error

    def __str__(self) -> str:
        return f"{100 * self.points:+.1f} ± {100 * self.error:.1f} points ({self.of})"


def five_lines(
    iterations: Sequence[Iteration],
    numbers: dict[str, Any],
    run: dict[str, Any],
    evaluations: Sequence[dict[str, Any]] = (),
    nothing_learned: Finding | None = None,
    folder: str | None = None,
) -> str:
    """Return the five lines, from the contents of analysis.json (`numbers`) and run.json.

    `nothing_learned`: the verdict of `runs.verdict`. `folder`: the run's folder, for commands.
    """
    window = max(1, min(WINDOW, len(iterations) // 2))
    last = iterations[-window:]
    start, end = success_of(iterations[:window]), success_of(last)
    is_log = "traces" in run
    pair = before_and_after(evaluations) if evaluations else ()
    evaluated = [one for one in pair if one.get("success_rate") is not None]
    row = row_of(run.get("estimator", {}).get("estimator_name", "g2po"))
    has_lambda = not is_log and row is not None and row.uses_value_lambda
    used = run.get("trainer", {}).get("value_lambda", 1.0) if has_lambda else None
    finding, advice = keys.in_short(numbers["prediction"], used)
    if nothing_learned:
        verdict, to_do = f"{nothing_learned.seen}.", nothing_learned.remedy
    elif is_log:
        verdict, to_do = f"These runs were not trained on. {finding}", advice
    else:
        change = None if len(iterations) == 1 else _change(start, end, evaluated)
        verdict = f"{_learned(change)} {finding}"
        to_do = f"{_next_step(last, end, change)} {advice}".strip()
    failures = _failures(last, "" if is_log else f" in {end.where}")
    lines = {
        "Success": f"{100 * end.rate:.1f} %." if is_log else _success(start, end, len(iterations), evaluated),
        "Failures": f"{failures} {losses.in_short(numbers['losses'], None if is_log else folder)}",
        "Recurrence": _recurrence(numbers["iterations"], last),
        "Verdict": verdict,
        "What to do": to_do or "Nothing stands out.",
    }
    if np.isnan(end.rate):
        lines["Success"] = "No episode has a result."
    return "\n".join(_wrapped(name, text) for name, text in lines.items())


def success_of(iterations: Sequence[Iteration]) -> Success:
    """Return the success of some iterations; nan if no episode has a result."""
    rates = [float(np.mean([t.success for t in group])) for group in _counted(iterations)]
    played = [group for iteration in iterations for group in iteration.groups]
    rate = float(np.mean(rates)) if rates else float("nan")
    return Success(rate, careful_error(map(wins, played)), iterations[0].number, iterations[-1].number)


def _counted(iterations: Sequence[Iteration]) -> list[list[Trajectory]]:
    """Return the groups' trajectories with a result, without groups that have none."""
    groups = [[t for t in group if t.counted] for iteration in iterations for group in iteration.groups]
    return [group for group in groups if group]


def _success(start: Success, end: Success, number: int, evaluated: Sequence[dict[str, Any]]) -> str:
    text = str(end) if number == 1 or np.isnan(start.rate) else f"{start}, {end}"
    if len(evaluated) == 2:
        shown = evaluated[1:] if evaluated[0] is evaluated[1] else evaluated
        rates = [f"{100 * one['success_rate']:.1f} %" for one in shown]
        text += f". Evaluation: {', then '.join(rates)}"
        text += f" of {shown[-1]['episodes']} episodes" if "episodes" in shown[-1] else ""
    return f"{text}."


def _failures(iterations: Sequence[Iteration], where: str) -> str:
    """Return which groups failed in every episode, and how failed episodes end."""
    groups = _counted(iterations)
    lost_groups = [group for group in groups if not any(t.success for t in group)]
    lost = [t for iteration in iterations for group in iteration.groups for t in group if not t.success]
    text = f"{len(lost_groups)} of {len(groups)} groups failed in every episode{where}"
    if lost_groups:
        of_all = {group[0].task for group in groups}  # of a game with one sentence, ids tell tasks apart
        names = (group[0].task_id if len(of_all) == 1 else group[0].task or group[0].task_id for group in lost_groups)
        (task, times), *_ = Counter(names).most_common(1)
        text += f", most often {textwrap.shorten(task, 60)!r}" if times > 1 else ""
    if not lost:
        return f"{text}."
    shares = [(number / len(lost), end) for end, number in Counter(_ENDS[t.outcome] for t in lost).most_common()]
    shares += [(_share_inadmissible(lost), "of actions were not admissible")]
    shares += [(returned_share(lost), "of steps returned to an earlier state")]
    ends = ", ".join(f"{100 * share:.0f} % {what}" for share, what in shares if share is not None)
    return f"{text}. Of {len(lost):,} failed episodes: {ends}."


def _recurrence(rows: Sequence[dict[str, Any]], last: Sequence[Iteration]) -> str:
    """Return how often states recur within a group, and whether a number in their keys prevents it."""
    if not sum(row["steps"] for row in rows):
        return "No episode with a result took a step."
    visits, once = (np.nanmean([row["group_size"][name] for row in rows]) for name in ("mean", "singleton_steps"))
    share = 100 * (1 - once)
    text = f"A state is visited {visits:.1f} times in its group; {share:.0f} % of steps are in one that recurs."
    counted = count_in_keys([t for iteration in last for group in iteration.groups for t in group])
    return text if counted is None else f"{text} {counted}. If it is a counter or a clock, leave it out of the keys."


def _change(start: Success, end: Success, evaluated: Sequence[dict[str, Any]]) -> Change | None:
    """Return the change of success with the smaller standard error: in training or in evaluations; `None`: unknown."""
    error = float(np.hypot(start.error, end.error))
    changes = [Change(end.rate - start.rate, error, "in training, one standard error over groups")]
    of_evaluations = [(one["success_rate"], one.get("episodes", 0)) for one in evaluated]
    if len(evaluated) == 2 and evaluated[0] is not evaluated[1] and min(n for _, n in of_evaluations) >= FEWEST:
        error = float(np.hypot(*(error_of_share(rate * number, number) for rate, number in of_evaluations)))
        points = of_evaluations[1][0] - of_evaluations[0][0]
        changes.append(Change(points, error, "in evaluations, one standard error"))
    known = [change for change in changes if not np.isnan(change.points + change.error)]
    return min(known, key=lambda change: change.error, default=None)


def _learned(change: Change | None) -> str:
    if change is None:
        return "Too little to tell whether it learns."
    if not change.is_clear:
        return f"No clear change of success: {change}."
    return f"It learned: {change}." if change.points > 0 else f"Success fell: {change}."


def _next_step(iterations: Sequence[Iteration], end: Success, change: Change | None) -> str:
    """Return advice by the state in which the run ended; "" if no episode has a result."""
    groups = _counted(iterations)
    if not groups:
        return ""
    lost = sum(not any(t.success for t in group) for group in groups) / len(groups)
    inadmissible = _share_inadmissible([t for group in groups for t in group]) or 0.0
    clear = change is not None and change.is_clear
    advice = {  # the first whose condition holds
        "Lower the learning rate, and look at kl and valid completions.": clear and change.points < 0,
        "Nearly every episode succeeds: use harder tasks.": end.rate > 0.95,
        "Most actions are not admissible: use a stronger model, or a higher --target-success of g2po teach.": (
            inadmissible > 0.5
        ),
        "Most groups fail in every episode: use easier tasks, a stronger model, or larger groups.": lost > 0.5,
        "Train on while evaluations rise: the same command with --resume-from-checkpoint auto and more "
        "--max-steps.": clear,
        "Train for longer, or raise the learning rate.": True,
    }
    return next(text for text, holds in advice.items() if holds)


def _share_inadmissible(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of actions that were not listed; `None` if no environment lists actions."""
    listed = [step.admissible for t in trajectories for step in t.steps if step.admissible is not None]
    return 1 - float(np.mean(listed)) if listed else None


def _wrapped(name: str, text: str) -> str:
    options = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.fill(text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=" " * INDENT, **options)
    return lines.replace(losses.UNBROKEN, " ")
