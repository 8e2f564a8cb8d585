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
from ..trajectory import Trajectory
from . import key_quality as keys
from . import losses

WINDOW = 5  # iterations at both ends of a run that are compared; fewer of a short run
WIDTH, INDENT = 110, 14
CLEAR = 2.0  # standard errors
CONTINUE = "the same command with --resume-from-checkpoint auto and more --max-steps"
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

    def __str__(self) -> str:
        return f"{100 * self.rate:.1f} % in {_where(self.first, self.last)}"


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
    nothing_learned: str | None = None,
    folder: str | None = None,
) -> str:
    """Return the five lines, from the contents of analysis.json (`numbers`) and run.json.

    `nothing_learned`: the verdict of `runs.verdict`. `folder`: the run's folder, for commands.
    """
    window = max(1, min(WINDOW, len(iterations) // 2))
    start, end = success_of(iterations[:window]), success_of(iterations[-window:])
    is_log = "traces" in run
    row = row_of(run.get("estimator", {}).get("estimator_name", "g2po"))
    has_lambda = not is_log and row is not None and row.uses_value_lambda
    used = run.get("trainer", {}).get("value_lambda", 1.0) if has_lambda else None
    finding, advice = keys.in_short(numbers["prediction"], used)
    if nothing_learned:
        reason, _, remedy = nothing_learned.partition(". ")
        verdict, to_do = f"{reason}.", remedy
    else:
        change = None if is_log or len(iterations) == 1 else _change(start, end, evaluations)
        learned = "These runs were not trained on." if is_log else _learned(change)
        verdict = f"{learned} {finding}"
        to_do = " ".join(filter(None, [None if is_log else _next_step(iterations[-window:], end, change), advice]))
    lines = {
        "Success": _success(start, end, len(iterations), evaluations, is_log),
        "Failures": " ".join(
            filter(
                None,
                [
                    _failures(iterations[-window:], "" if is_log else f" in {_where(end.first, end.last)}"),
                    losses.in_short(numbers["losses"], None if is_log else folder) if "losses" in numbers else "",
                ],
            )
        ),
        "Recurrence": _recurrence(numbers["iterations"], iterations[-window:]),
        "Verdict": verdict,
        "What to do": to_do or "Nothing stands out.",
    }
    return "\n".join(_wrapped(name, text) for name, text in lines.items())


def success_of(iterations: Sequence[Iteration]) -> Success:
    """Return the success of some iterations; nan if no episode has a result."""
    groups = [[t.success for t in group if t.counted] for iteration in iterations for group in iteration.groups]
    rates = [float(np.mean(group)) for group in groups if group]
    rate = float(np.mean(rates)) if rates else float("nan")
    played = [group for iteration in iterations for group in iteration.groups]
    return Success(rate, careful_error(map(wins, played)), iterations[0].number, iterations[-1].number)


def _success(start: Success, end: Success, number: int, evaluations: Sequence[dict[str, Any]], is_log: bool) -> str:
    if np.isnan(end.rate):
        return "No episode has a result."
    if is_log:
        return f"{100 * end.rate:.1f} %."
    said = str(end) if number == 1 or np.isnan(start.rate) else f"{start}, {end}"
    evaluated = before_and_after(evaluations) if evaluations else ()
    rates = [f"{100 * one['success_rate']:.1f} %" for one in evaluated if one.get("success_rate") is not None]
    if len(rates) == 2:
        before, after = evaluated
        said += f". Evaluation: {rates[-1] if before is after else ', then '.join(rates)}"
        said += f" of {after['episodes']} episodes" if "episodes" in after else ""
    return f"{said}."


def _failures(iterations: Sequence[Iteration], where: str) -> str:
    """Return which groups failed in every episode, and how failed episodes end."""
    groups = [[t for t in group if t.counted] for iteration in iterations for group in iteration.groups]
    groups = [group for group in groups if group]
    lost_groups = [group for group in groups if not any(t.success for t in group)]
    everyone = [t for iteration in iterations for group in iteration.groups for t in group]
    lost = [t for t in everyone if not t.success]
    said = (
        f"{len(lost_groups)} of {len(groups)} groups failed in every episode{where}"
        if groups
        else "No group to compare"
    )
    if lost_groups:
        of_all = {group[0].task for group in groups}  # of a game with one sentence, ids tell tasks apart
        names = (group[0].task_id if len(of_all) == 1 else group[0].task or group[0].task_id for group in lost_groups)
        (task, times), *_ = Counter(names).most_common(1)
        said += f", most often {textwrap.shorten(task, 60)!r}" if times > 1 else ""
    if not lost:
        return f"{said}."
    ends = Counter(_ENDS[t.outcome] for t in lost).most_common()
    shares = [f"{100 * number / len(lost):.0f} % {end}" for end, number in ends]
    inadmissible, returned = _share_inadmissible(lost), returned_share(lost)
    if inadmissible is not None:
        shares.append(f"{100 * inadmissible:.0f} % of actions were not admissible")
    if returned is not None:
        shares.append(f"{100 * returned:.0f} % of steps returned to an earlier state")
    return f"{said}. Of {len(lost):,} failed episodes: {', '.join(shares)}."


def _recurrence(rows: Sequence[dict[str, Any]], last: Sequence[Iteration]) -> str:
    """Return how often states recur within a group, and whether a number in their keys prevents it."""
    if not sum(row["steps"] for row in rows):
        return "No episode with a result took a step."
    visits, once = ([row["group_size"][name] for row in rows] for name in ("mean", "singleton_steps"))
    share = 100 * (1 - np.nanmean(once))
    often = f"{np.nanmean(visits):.1f} times"
    said = f"A state is visited {often} in its group; {share:.0f} % of steps are in one that recurs."
    counted = count_in_keys([one for iteration in last for group in iteration.groups for one in group])
    return said if counted is None else f"{said} {counted}. If it is a counter or a clock, leave it out of the keys."


def _change(start: Success, end: Success, evaluations: Sequence[dict[str, Any]]) -> Change | None:
    """Return the change of success with the smaller standard error: in training or in evaluations; `None`: unknown."""
    error = float(np.hypot(start.error, end.error))
    changes = [Change(end.rate - start.rate, error, "in training, one standard error over groups")]
    before, after = before_and_after(evaluations) if evaluations else ({}, {})
    rates = [one.get("success_rate") for one in (before, after)]
    numbers = [one.get("episodes", 0) for one in (before, after)]
    if before is not after and None not in rates and min(numbers) >= FEWEST:
        error = float(np.hypot(*(error_of_share(rate * number, number) for rate, number in zip(rates, numbers))))
        changes.append(Change(rates[1] - rates[0], error, "in evaluations, one standard error"))
    known = [change for change in changes if not np.isnan(change.points + change.error)]
    return min(known, key=lambda change: change.error, default=None)


def _learned(change: Change | None) -> str:
    """Return whether success changed by more than its error."""
    if change is None:
        return "Too little to tell whether it learns."
    if not change.is_clear:
        return f"No clear change of success: {change}."
    return f"It learned: {change}." if change.points > 0 else f"Success fell: {change}."


def _next_step(iterations: Sequence[Iteration], end: Success, change: Change | None) -> str | None:
    """Return advice by the state in which the run ended."""
    groups = [[t for t in group if t.counted] for iteration in iterations for group in iteration.groups]
    groups = [group for group in groups if group]
    if not groups or np.isnan(end.rate):
        return None
    lost = sum(not any(t.success for t in group) for group in groups) / len(groups)
    inadmissible = _share_inadmissible([t for group in groups for t in group])
    clear = change is not None and change.is_clear
    if clear and change.points < 0:
        return "Lower the learning rate, and look at kl and valid completions."
    if end.rate > 0.95:
        return "Nearly every episode succeeds: use harder tasks."
    if inadmissible is not None and inadmissible > 0.5:
        return "Most actions are not admissible: use a stronger model, or a higher --target-success of g2po teach."
    if lost > 0.5:
        return "Most groups fail in every episode: use easier tasks, a stronger model, or larger groups."
    return (
        f"Train on while evaluations rise: {CONTINUE}." if clear else "Train for longer, or raise the learning rate."
    )


def _share_inadmissible(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of actions that were not listed; `None` if no environment lists actions."""
    listed = [step.admissible for t in trajectories for step in t.steps if step.admissible is not None]
    return 1 - float(np.mean(listed)) if listed else None


def _where(first: int, last: int) -> str:
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _wrapped(name: str, text: str) -> str:
    options = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.fill(text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=" " * INDENT, **options)
    return lines.replace(losses.UNBROKEN, " ")
