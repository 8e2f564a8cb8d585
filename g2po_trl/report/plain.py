"""A run in five plain lines: success, where groups fail, what recurs, the verdict, what to do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from ..check.statistics import count_in_keys, returned_share
from ..credit.estimators.registry import row_of
from ..runs.iterations import Iteration
from ..runs.metrics import careful_error, wins
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
    """Success of some iterations: mean over groups, its standard error (nan: too few), and where it was."""

    rate: float
    error: float
    where: str

    @classmethod
    def of(cls, iterations: Sequence[Iteration]) -> Success:
        """Return the success of some iterations; nan if no episode has a result."""
        rates = [float(np.mean([t.success for t in group])) for group in _counted(iterations)]
        error = careful_error(wins(group) for iteration in iterations for group in iteration.groups)
        first, last = iterations[0].number, iterations[-1].number
        where = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        return cls(float(np.mean(rates)) if rates else float("nan"), error, where)

    def __str__(self) -> str:
        return f"{100 * self.rate:.1f} % in {self.where}"


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
    last, is_log = iterations[-window:], "traces" in run
    start, end = Success.of(iterations[:window]), Success.of(last)
    pair = [one for one in (before_and_after(evaluations) if evaluations else ()) if one["success_rate"] is not None]
    evaluated = pair[1:] if len(pair) == 2 and pair[0] is pair[1] else pair
    row = row_of(run.get("estimator", {}).get("estimator_name", "g2po"))
    has_lambda = not is_log and row is not None and row.uses_value_lambda
    used = run.get("trainer", {}).get("value_lambda", 1.0) if has_lambda else None
    finding, advice = keys.in_short(numbers["prediction"], used)
    if nothing_learned:
        verdict, to_do = f"{nothing_learned.seen}.", nothing_learned.remedy
    elif is_log:
        verdict, to_do = f"These runs were not trained on. {finding}", advice
    else:
        learned, to_do = _learned(start, end, last, evaluated if len(iterations) > 1 else None)
        verdict, to_do = f"{learned} {finding}", f"{to_do} {advice}".strip()
    success = f"{100 * end.rate:.1f} %." if is_log else _success(start, end, evaluated)
    failures = _failures(last, "" if is_log else f" in {end.where}")
    lines = {
        "Success": "No episode has a result." if np.isnan(end.rate) else success,
        "Failures": f"{failures} {losses.in_short(numbers['losses'], None if is_log else folder)}",
        "Recurrence": _recurrence(numbers["iterations"], last),
        "Verdict": verdict,
        "What to do": to_do or "Nothing stands out.",
    }
    return "\n".join(_wrapped(name, text) for name, text in lines.items())


def _counted(iterations: Sequence[Iteration]) -> list[list[Trajectory]]:
    """Return the groups' trajectories with a result, without groups that have none."""
    groups = [[t for t in group if t.counted] for iteration in iterations for group in iteration.groups]
    return [group for group in groups if group]


def _success(start: Success, end: Success, evaluated: Sequence[dict[str, Any]]) -> str:
    text = str(end) if start.where == end.where or np.isnan(start.rate) else f"{start}, {end}"
    if evaluated:
        rates = ", then ".join(f"{100 * one['success_rate']:.1f} %" for one in evaluated)
        number = evaluated[-1].get("episodes")
        text += f". Evaluation: {rates}" + (f" of {number} episodes" if number else "")
    return f"{text}."


def _failures(iterations: Sequence[Iteration], where: str) -> str:
    """Return how many groups failed in every episode, and how failed episodes end."""
    groups = _counted(iterations)
    lost = [t for iteration in iterations for group in iteration.groups for t in group if not t.success]
    text = f"{_all_lost(groups)} of {len(groups)} groups failed in every episode{where}."
    if not lost:
        return text
    shares = [(number / len(lost), end) for end, number in Counter(_ENDS[t.outcome] for t in lost).most_common()]
    listed = [step.admissible for t in lost for step in t.steps if step.admissible is not None]
    shares += [(listed.count(False) / len(listed), "of actions were not admissible")] if listed else []
    shares += [(returned_share(lost), "of steps returned to an earlier state")]
    ends = ", ".join(f"{100 * share:.0f} % {what}" for share, what in shares if share is not None)
    return f"{text} Of {len(lost):,} failed episodes: {ends}."


def _all_lost(groups: Sequence[Sequence[Trajectory]]) -> int:
    return sum(not any(t.success for t in group) for group in groups)


def _recurrence(rows: Sequence[dict[str, Any]], last: Sequence[Iteration]) -> str:
    """Return how often states recur within a group, and whether a number in their keys prevents it."""
    rows = [row for row in rows if row["steps"]]
    if not rows:
        return "No episode with a result took a step."
    visits, alone = (np.mean([row[name] for row in rows]) for name in ("mean_group_size", "singleton_step_fraction"))
    shared = 100 * (1 - alone)
    text = f"A state is visited {visits:.1f} times in its group; {shared:.0f} % of steps are in one that recurs."
    counted = count_in_keys([t for iteration in last for group in iteration.groups for t in group])
    return text if counted is None else f"{text} {counted}. If it is a counter or a clock, leave it out of the keys."


def _learned(
    start: Success, end: Success, last: Sequence[Iteration], evaluated: Sequence[dict[str, Any]] | None
) -> tuple[str, str]:
    """Return whether success changed, in training or evaluations, by the less noisy of both, and what to do.

    `evaluated`: the first and the last evaluation, if there are two. `None`: nothing can be compared.
    """
    changes = []
    if evaluated is not None:
        of_training = "in training, one standard error over groups"
        changes.append((float(np.hypot(start.error, end.error)), end.rate - start.rate, of_training))
    errors = [one["success_rate_error"] for one in evaluated or () if one.get("success_rate_error") is not None]
    if len(errors) == 2:
        rates = [one["success_rate"] for one in evaluated]
        changes.append((float(np.hypot(*errors)), rates[1] - rates[0], "in evaluations, one standard error"))
    known = [change for change in changes if not np.isnan(change[0] + change[1])]
    error, points, source = min(known, key=itemgetter(0), default=(0.0, 0.0, ""))
    is_clear, groups = abs(points) > CLEAR * error, _counted(last)
    what = "No clear change of success" if not is_clear else "It learned" if points > 0 else "Success fell"
    text = f"{what}: {100 * points:+.1f} ± {100 * error:.1f} points ({source})."
    text = text if known else "Too little to tell whether it learns."
    advice = {  # the first whose condition holds
        "": not groups,
        "Lower the learning rate, and look at kl and valid completions.": is_clear and points < 0,
        "Nearly every episode succeeds: use harder tasks.": end.rate > 0.95,
        "Most groups fail in every episode: use easier tasks, a stronger model, or larger groups.": (
            _all_lost(groups) > 0.5 * len(groups)
        ),
        "Continue while evaluations rise: repeat the command with --resume-from-checkpoint auto and more "
        "--max-steps.": is_clear,
        "Train for longer, or raise the learning rate.": True,
    }
    return text, next(said for said, holds in advice.items() if holds)


def _wrapped(name: str, text: str) -> str:
    options = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.fill(text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=" " * INDENT, **options)
    return lines.replace(losses.UNBROKEN, " ")
