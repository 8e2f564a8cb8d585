"""Which λ do a run's data prefer, and are its state keys good? The test that `g2po report` prints.

Each episode of a group is left out once, and its returns are predicted by the values that the others give its states
(`leave_one_out`). λ < 1 trusts that what follows a state does not depend on how it was reached. If it predicts
better, values made with it may be better. Keys hide something that matters if the same action from the same state
leads to states of different worth (or the environment is random), or if λ = 0 predicts worse at states that were
visited often, where λ = 1 has enough returns to average, or even over all states.

Errors are compared as ratios of sums over groups. Groups are independent units and their steps are not, so intervals
come from a bootstrap that draws groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..credit.graph import StateGraph
from .analysis import Iteration
from .leave_one_out import (
    HIDDEN,
    LAMBDAS,
    LOSES,
    OFTEN,
    LeftOutErrors,
    best_lambda,
    hidden_share,
    left_out_errors,
    lost_standard_errors,
    same_action_spread,
)

# Classes of states by visits of a group's other episodes: least visits of each.
VISITS = (1, 3, OFTEN)
PERIODS = 3
RESAMPLES = 2000
# A percentile interval of fewer groups is too narrow to be called one.
LEAST_GROUPS = 8
# Groups whose values are solved for together: more at a time are faster, and take memory.
_TOGETHER = 512
KEYS_HELP = 'docs/your_environment.md, "State keys"'


def measure(
    iterations: Sequence[Iteration], gamma: float | Sequence[float]
) -> tuple[LeftOutErrors, np.ndarray, np.ndarray]:
    """Return errors and `same_action_spread` of all iterations as one batch of groups, and each group's iteration.

    `gamma`: of all iterations, or of each.
    """
    gammas = [gamma] * len(iterations) if isinstance(gamma, (int, float)) else list(gamma)
    of_group = np.repeat(np.arange(len(iterations)), [len(iteration.groups) for iteration in iterations])
    groups = [group for iteration in iterations for group in iteration.groups]
    parts, spread, starts = [], [], []
    for first, last in _together([gammas[i] for i in of_group]):
        graph = StateGraph.from_groups(groups[first:last], gammas[of_group[first]], with_actions=True)
        parts.append(left_out_errors(graph))
        truncated = [t.outcome == "truncated" for group in groups[first:last] for t in group]
        spread.append(same_action_spread(graph, np.array(truncated, bool)))
        starts.append(first)
    errors = LeftOutErrors(
        LAMBDAS,
        np.concatenate([part.errors for part in parts]),
        np.concatenate([part.visits for part in parts]),
        np.concatenate([part.group + start for part, start in zip(parts, starts)]),
        sum(part.num_steps for part in parts),
    )
    return errors, np.concatenate(spread), of_group


def _together(gammas: Sequence[float]) -> Iterator[tuple[int, int]]:
    """First and last group, exclusive, of those that are computed at once: `_TOGETHER` at most, of one gamma."""
    first = 0
    for i in range(1, len(gammas) + 1):
        if i == len(gammas) or i - first == _TOGETHER or gammas[i] != gammas[first]:
            yield first, i
            first = i


def examine(errors: LeftOutErrors, spread: np.ndarray, of_group: np.ndarray, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the part `prediction` of `analysis.json`.

    Args:
        errors: by `LAMBDAS`.
        spread: (groups, 2) `same_action_spread`.
        of_group: (groups,) iteration of each group, from 0.
        numbers: number of each iteration in the run.

    Returns:
        `lambdas`; `steps`; `unpredicted_share`: share of the steps whose state no other episode of the group visited;
        `rows`: see `table`; `hidden_share`: of how far next values of one state's steps differ, what is among steps of
        the same action, `None` if they do not differ or actions are hardly ever the same; `often_standard_errors`: by
        how many λ = 0 loses to λ = 1 at states visited often, `None` where there are none or no error differs;
        `lost_standard_errors`: the same over all states; `value_lambda`: the recommended λ (`best_lambda`) by all
        iterations, `None` if nothing could be compared; `verdict`: all of it in words.
    """
    rows = table(errors, of_group, numbers)
    everywhere, often = errors.by_group(), errors.by_group(OFTEN)
    compared = bool((errors.errors != errors.errors[:, :1]).any())
    tested = bool((often[:, LAMBDAS.index(0.0)] != often[:, LAMBDAS.index(1.0)]).any())
    found = {
        "lambdas": list(errors.lambdas),
        "steps": errors.num_steps,
        "unpredicted_share": 1 - len(errors.errors) / errors.num_steps if errors.num_steps else None,
        "rows": rows,
        "hidden_share": hidden_share(spread),
        "often_standard_errors": lost_standard_errors(often) if tested else None,
        "lost_standard_errors": lost_standard_errors(everywhere) if compared else None,
        "value_lambda": best_lambda(everywhere, spread) if compared else None,
    }
    return {**found, "verdict": verdict(found)}


def table(errors: LeftOutErrors, of_group: np.ndarray, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Errors by visits and iterations: all of them, then each class of visits, then the same for each third of a run.

    Returns:
        Rows of `visits` and `iterations`: first and last of the class, `None` for no bound; `steps` predicted;
        `groups` that have errors there; `mean_squared_error`: one for each λ, in units of reward squared; `relative`:
        its difference to that of λ = 1, by that of λ = 1; `interval`: the 95 % interval of each difference, `None`
        from fewer than `LEAST_GROUPS` groups.
    """
    groups, classes, lambdas = len(of_group), len(VISITS), len(errors.lambdas)
    cell = errors.group * classes + np.searchsorted(VISITS, errors.visits, side="right") - 1
    counts = np.bincount(cell, minlength=groups * classes).reshape(groups, classes)
    sums = np.stack([np.bincount(cell, of, minlength=groups * classes) for of in errors.errors.T], axis=-1)
    sums = sums.reshape(groups, classes, lambdas)

    thirds = np.array_split(np.arange(len(numbers)), PERIODS) if len(numbers) >= PERIODS else []
    rows, columns = [], []
    for period in [None, *thirds]:
        within = np.ones(groups, bool) if period is None else np.isin(of_group, period)
        for least in (None, *range(classes)):
            chosen = slice(None) if least is None else slice(least, least + 1)
            of_groups = np.where(within[:, None], sums[:, chosen].sum(axis=1), 0.0)
            columns.append(of_groups)
            steps = int(counts[within, chosen].sum())
            rows.append(
                {
                    "visits": None if least is None else [VISITS[least], *_last(least)],
                    "iterations": None if period is None else [int(numbers[period[0]]), int(numbers[period[-1]])],
                    "steps": steps,
                    "groups": int((of_groups > 0).any(axis=1).sum()),
                    "mean_squared_error": (of_groups.sum(axis=0) / steps).tolist() if steps else None,
                }
            )
    base = errors.lambdas.index(1.0)
    intervals = bootstrap(np.stack(columns, axis=1), base)
    for row, of_groups, interval in zip(rows, columns, intervals):
        total = of_groups.sum(axis=0)
        row["relative"] = (total / total[base] - 1).tolist() if total[base] > 0 else None
        enough = row["relative"] and row["groups"] >= LEAST_GROUPS
        row["interval"] = interval.tolist() if enough else None
    return rows


def bootstrap(sums: np.ndarray, base: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return 95 % bootstrap intervals of relative differences; groups are drawn with replacement.

    Args:
        sums: (groups, rows, L) sums of errors.
        base: index in L that the others are compared with.
        resamples: number of bootstrap samples.
        seed: of the draws.

    Returns:
        (rows, L, 2) ends of the percentile interval of sum / sum at `base` - 1, nan where no draw has an error. Draws
        are paired: a group counts for all λ or for none.
    """
    groups, rows, lambdas = sums.shape
    rng = np.random.default_rng(seed)
    flat = sums.reshape(groups, rows * lambdas)
    drawn = []
    for start in range(0, resamples, 100):
        size = min(100, resamples - start)
        places = rng.integers(0, groups, (size, groups)) + groups * np.arange(size)[:, None]
        drawn.append(np.bincount(places.ravel(), minlength=size * groups).reshape(size, groups) @ flat)
    totals = np.concatenate(drawn).reshape(resamples, rows, lambdas)
    below = totals[:, :, base]
    relative = totals / np.where(below > 0, below, np.nan)[:, :, None] - 1
    ends = np.full((rows, lambdas, 2), np.nan)
    for row in np.flatnonzero((below > 0).any(axis=0)):
        ends[row] = np.nanpercentile(relative[:, row], [2.5, 97.5], axis=0).T
    return ends


def verdict(found: dict[str, Any]) -> str:
    """Return the test in words: which λ the data prefer, whether keys look Markov, what to do."""
    whole = found["rows"][0]
    if not found["steps"]:
        return "No episode took a step that counts: there is nothing to test the keys with."
    if not whole["steps"]:
        return (
            "No state was visited by two episodes of a group, so the keys cannot be tested: if groups have several "
            f"episodes, the keys are too fine. See {KEYS_HELP}."
        )
    if found["value_lambda"] is None:
        return "Every λ predicts these returns equally well, so the run says nothing about value_lambda or the keys."
    if whole["interval"] is None:
        return (
            f"Too few groups have prediction errors ({whole['groups']}) to compare values of λ: {LEAST_GROUPS} are "
            "needed. Train for longer, or log more tasks."
        )
    often = next(row for row in found["rows"] if row["visits"] == [OFTEN, None])
    share, hidden, lost = found["hidden_share"], found["often_standard_errors"], found["lost_standard_errors"]
    if share is not None and share > HIDDEN:
        return (
            f"The keys hide something that matters, or the environment is random: {100 * share:.0f} % of how far the "
            f"next states of a state differ in value is among steps of the same action (right keys: at most "
            f"{100 * HIDDEN:.0f} %). Keep value_lambda 1, and see {KEYS_HELP}. {_preferred(whole)}"
        )
    for where, row, errors in (
        (f"at states that other episodes visited at least {OFTEN} times", often, hidden),
        ("over all states", whole, lost),
    ):
        if errors is not None and errors > LOSES:
            return (
                f"The keys hide something that matters: {where}, λ = 0 predicts returns worse than λ = 1 (squared "
                f"error {_change(row, 0.0)}; {errors:.1f} standard errors). Keep value_lambda 1, and see {KEYS_HELP}."
            )
    return " ".join([_preferred(whole), _keys(often, hidden), _advice(whole, found["value_lambda"])])


def in_short(found: dict[str, Any], used: float = 1.0) -> tuple[str, str]:
    """Return the verdict as a finding and an advice, either may be empty. `used`: value_lambda of the run."""
    whole, share = found["rows"][0], found["hidden_share"]
    if not found["steps"]:
        return "", ""
    if not whole["steps"]:
        return "No state was visited by two episodes of a group.", f"Use coarser state keys: {KEYS_HELP}."
    if found["value_lambda"] is None or whole["interval"] is None:
        return "Too little data to test the state keys.", ""
    errors = [found[name] for name in ("often_standard_errors", "lost_standard_errors")]
    if (share is not None and share > HIDDEN) or any(one is not None and one > LOSES for one in errors):
        keep = f"If success stalls, let the state keys show more: {KEYS_HELP}."
        finding = "The state keys hide something, or the environment is random."
        return finding, keep if used == 1 else f"Set value_lambda 1. {keep}"
    best = 1.0 if not _is_better(whole, found["value_lambda"]) else found["value_lambda"]
    return "The state keys look right.", "" if best == used else f"Try --value_lambda {best:g}."


def _preferred(whole: dict[str, Any]) -> str:
    best = _best(whole)
    if best == 1:
        return "λ = 1 predicts the returns of left-out episodes best."
    apart = "" if _is_better(whole, best) else ", not significantly better than λ = 1"
    return (
        f"λ = {best:g} predicts the returns of left-out episodes best (squared error {_change(whole, best)}){apart}."
    )


def _keys(often: dict[str, Any], hidden: float | None) -> str:
    where = f"at states that other episodes visited at least {OFTEN} times"
    if hidden is None or often["interval"] is None:
        return f"The keys could not be tested: too few groups have prediction errors {where} ({often['groups']})."
    compared = "predicts better than" if hidden < -LOSES else "does not differ significantly from"
    return f"No sign that the keys hide something: {where}, λ = 0 {compared} λ = 1 ({_change(often, 0.0)})."


def _advice(whole: dict[str, Any], chosen: float) -> str:
    if chosen == 1 or not _is_better(whole, chosen):
        return "Keep value_lambda 1."
    return f"Try --value_lambda {chosen:g}."


def _best(row: dict[str, Any]) -> float:
    return LAMBDAS[int(np.argmin(row["mean_squared_error"]))]


def _is_better(row: dict[str, Any], of: float) -> bool:
    return row["interval"][LAMBDAS.index(of)][1] < 0


def _change(row: dict[str, Any], of: float) -> str:
    """Return a text such as `-4.3 %, 95 % interval -6.0 to -2.7 %`, without parts that are unknown."""
    number = LAMBDAS.index(of)
    if row["relative"] is None:
        return f"{row['mean_squared_error'][number]:.3g} instead of 0"
    if row["interval"] is None:
        return f"{100 * row['relative'][number]:+.1f} %"
    low, high = row["interval"][number]
    return f"{100 * row['relative'][number]:+.1f} %, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} %"


def text(found: dict[str, Any]) -> str:
    """Return the table of the test as lines: all predictions, by visits, by iterations; then the verdict."""
    rows = found["rows"]
    lines = ["test of the state keys: how well a group's values predict the returns of an episode that is left out"]
    if found["unpredicted_share"] is not None:
        lines.append(
            f"{100 * found['unpredicted_share']:.1f} % of steps are not predicted: no other episode of their group "
            "visited their state"
        )
    if rows[0]["steps"]:
        others = [f"λ = {of:g}, % [95 %]" for of in found["lambdas"][1:]]
        lines.append("mean squared error at λ = 1, and how far other λ change it, with intervals over groups:")
        lines.append(f"{'states':<18}{'steps':>8}{'λ = 1':>8}" + "".join(f"{of:>21}" for of in others))
        lines += [_line(row) for row in rows if row["visits"] is None or row["iterations"] is None]
    return "\n".join([*lines, found["verdict"]])


def label(row: dict[str, Any]) -> str:
    """Return the name of a row: "all", "3-7 visits", "iterations 1-14"."""
    for name in ("visits", "iterations"):
        if row[name] is not None:
            first, last = row[name]
            many = f"{first}+" if last is None else f"{first}" if first == last else f"{first}-{last}"
            return f"{many} visits" if name == "visits" else f"iterations {many}"
    return "all"


def curves(found: dict[str, Any]) -> dict[str, tuple[list[float], list[list[float]]]]:
    """Return the curves of `plots.prediction_errors`: differences and intervals of a whole run, by visits."""
    rows = [row for row in found["rows"] if row["iterations"] is None and row["interval"] is not None]
    return {label(row): (row["relative"], row["interval"]) for row in rows}


def _line(row: dict[str, Any]) -> str:
    start = f"{label(row):<18}{row['steps']:>8}"
    if not row["steps"]:
        return start
    start += f"{row['mean_squared_error'][0]:>8.3g}"
    if row["relative"] is None:
        return start
    cells = [f"{100 * of:+.1f}" for of in row["relative"][1:]]
    if row["interval"] is not None:
        cells = [f"{c} [{100 * low:+.1f}, {100 * high:+.1f}]" for c, (low, high) in zip(cells, row["interval"][1:])]
    return start + "".join(f"{cell:>21}" for cell in cells)


def _last(least: int) -> list[int | None]:
    return [VISITS[least + 1] - 1 if least + 1 < len(VISITS) else None]
