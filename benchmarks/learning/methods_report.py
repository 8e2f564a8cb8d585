"""What the runs of `benchmarks/results/methods` amount to: which method is told apart from G2PO.

A run is the content of its JSON file: `setting`, `method`, `seed`, `training.success` (a fraction an
iteration) and `held_out` (`success_rate`, `success_rate_by_type`, `turns_to_success`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement
from math import factorial, prod, sqrt
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.learning.comparison_statistics import paired_interval

Run = Mapping[str, Any]
Runs = Mapping[tuple[str, str, int], Run]  # (setting, method, seed) -> run

REFERENCE = "g2po"
START = "start"  # the model that every run starts from
# Auto is lambda 1 where it finds that keys hide something.
MAY_REPEAT = {"g2po lambda auto": "g2po", "g2po memory lambda auto": "g2po memory"}


def training(run: Run) -> float:
    """The primary number: mean success over all iterations of training."""
    return float(np.mean(run["training"]["success"]))


def held_out(run: Run) -> float:
    """The second: success on held-out games after training."""
    return float(run["held_out"]["success_rate"])


def bootstrap_interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float] | None:
    """Percentiles of the mean of values drawn with replacement: of all such draws, each with its probability.

    `None` for fewer than two values.
    """
    count = len(values)
    if count < 2:
        return None
    if count > 10:
        raise ValueError(f"values has {count} entries: the draws of more than 10 are too many to go through")
    times, weights = _draws(count)
    means = times @ np.asarray(values, dtype=np.float64) / count
    order = np.argsort(means)
    reached = np.cumsum(weights[order])
    low, high = ((1 - share) / 2, (1 + share) / 2)
    at = np.minimum(np.searchsorted(reached, [low, high]), len(order) - 1)
    return tuple(float(means[order[i]]) for i in at)


@cache
def _draws(count: int) -> tuple[np.ndarray, np.ndarray]:
    """All draws of `count` from as many: how often each is drawn [draw, value], and how probable the draw is."""
    times = np.array([np.bincount(d, minlength=count) for d in combinations_with_replacement(range(count), count)])
    weights = [factorial(count) / prod(factorial(int(t)) for t in row) for row in times]
    return times, np.array(weights) / count**count


def difference(runs: Runs, setting: str, method: str, number: Callable[[Run], float]) -> dict[str, Any] | None:
    """A method less G2PO, paired by seed: `seeds`, `values`, `mean`, `interval` (bootstrap), `t_interval`, `apart`.

    `apart`: both intervals leave out 0. Of four seeds the bootstrap's alone does so in one case of eight without any
    difference: whenever all four have the same sign. `None` without a common seed.
    """
    of = {seed: run for (where, name, seed), run in runs.items() if (where, name) == (setting, method)}
    against = {seed: run for (where, name, seed), run in runs.items() if (where, name) == (setting, REFERENCE)}
    seeds = sorted(set(of) & set(against))
    if not seeds:
        return None
    values = [number(of[seed]) - number(against[seed]) for seed in seeds]
    intervals = [bootstrap_interval(values), paired_interval(values)]
    apart = all(interval is not None and (interval[0] > 0 or interval[1] < 0) for interval in intervals)
    return {
        "seeds": seeds,
        "values": values,
        "mean": float(np.mean(values)),
        "interval": intervals[0],
        "t_interval": intervals[1],
        "apart": apart,
    }


def differences_with_one_spread(
    runs: Runs, setting: str, methods: Sequence[str], number: Callable[[Run], float]
) -> dict[str, Any] | None:
    """Every method less G2PO by least squares of number = method + seed + noise, the noise alike for all methods.

    A method's own four differences say little about how much they vary, and Student's interval of them is wide. All
    methods were played with the same tasks: their runs together say more, if they vary alike. A method that repeats
    another's runs is left out: it would count as noise of 0.

    Returns:
        `spread`: the noise's standard deviation; `freedom`: its degrees of freedom; `seeds`; and by method `mean`,
        `interval` (Student's, 95 %) and `p` (two-sided, by Holm for all methods together). `None`: no noise to see.
    """
    values = {key[1:]: number(run) for key, run in sorted(runs.items()) if key[0] == setting and key[1] in methods}
    values = {key: value for key, value in values.items() if not repeats(runs, setting, key[0])}
    seeds = sorted({seed for _, seed in values})
    others = sorted({method for method, _ in values} - {REFERENCE}, key=methods.index)
    columns = [*others, *seeds]
    if REFERENCE not in {method for method, _ in values} or not others or len(values) <= len(columns):
        return None
    effects = np.array([[effect in key for effect in columns] for key in values], dtype=np.float64)
    fitted, _, rank, _ = np.linalg.lstsq(effects, np.array([*values.values()]), rcond=None)
    freedom = len(values) - int(rank)
    noise = np.array([*values.values()]) - effects @ fitted
    spread = sqrt(float(noise @ noise) / freedom)
    errors = spread * np.sqrt(np.diag(np.linalg.pinv(effects.T @ effects)))[: len(others)]
    means, half = fitted[: len(others)], stats.t.ppf(0.975, freedom) * errors
    p = _holm(2 * stats.t.sf(np.abs(means) / errors, freedom))
    return {
        "spread": spread,
        "freedom": freedom,
        "seeds": seeds,
        "of": {
            method: {"mean": float(mean), "interval": (float(mean - h), float(mean + h)), "p": float(q)}
            for method, mean, h, q in zip(others, means, half, p, strict=True)
        },
    }


def repeats(runs: Runs, setting: str, method: str) -> bool:
    """Whether all its runs so far are those of another method over again, number by number."""
    of = {seed: run for (where, name, seed), run in runs.items() if (where, name) == (setting, method)}
    pairs = [(run, runs.get((setting, MAY_REPEAT.get(method, ""), seed))) for seed, run in of.items()]
    return bool(pairs) and all(
        other is not None
        and run["training"]["success"] == other["training"]["success"]
        and held_out(run) == held_out(other)
        for run, other in pairs
    )


def _holm(p: np.ndarray) -> np.ndarray:
    """p-values of as many tests together: the smallest times their number, the next times one less, …, rising."""
    order = np.argsort(p)
    rising = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    together = np.empty_like(p)
    together[order] = np.minimum(rising, 1)
    return together


def points(value: float) -> str:
    return f"{100 * value:.1f}"


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation, in percent."""
    return points(float(np.mean(values))) + (f" ± {points(float(np.std(values, ddof=1)))}" if len(values) > 1 else "")


def table_with_one_spread(runs: Runs, setting: str, methods: Sequence[str]) -> list[str]:
    """Markdown of `differences_with_one_spread` for training and held-out success."""
    found = [differences_with_one_spread(runs, setting, methods, number) for number in (training, held_out)]
    if None in found:
        return []
    noise = [f"{points(f['spread'])} points ({f['freedom']} degrees of freedom)" for f in found]
    lines = [
        f"All methods fitted together (method + seed + noise): noise of {noise[0]} in training, {noise[1]} held-out.",
        "",
        "| method minus g2po | training | p (Holm) | held-out | p (Holm) |",
        "|---|---|---|---|---|",
    ]
    for method in found[0]["of"]:
        cells = []
        for of in (f["of"][method] for f in found):
            low, high = (f"{100 * end:+.1f}" for end in of["interval"])
            cells += [f"{100 * of['mean']:+.1f} [{low}, {high}]", f"{of['p']:.3f}" if of["p"] >= 0.001 else "< 0.001"]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def verdict(found: Mapping[str, Any] | None) -> str:
    """One cell: the difference in points, its interval, and whether it is one."""
    if found is None:
        return "no common seed"
    mean = f"{100 * found['mean']:+.1f}"
    if found["interval"] is None:
        return f"{mean} (one seed)"
    low, high = (f"{100 * end:+.1f}" for end in found["interval"])
    return f"{mean} [{low}, {high}] {'**told apart**' if found['apart'] else 'not told apart'}"


def table(runs: Runs, setting: str, order: Sequence[str], types: Mapping[str, str]) -> list[str]:
    """Markdown of a setting, with as many seeds as there are. `types`: task type -> heading."""
    lines = [
        f"| method | seeds | mean of training | minus g2po | held-out | minus g2po | {' | '.join(types.values())} |",
        f"|---|---|---|---|---|---|{'---|' * len(types)}",
    ]
    for method in order:
        of = [runs[key] for key in sorted(runs) if key[:2] == (setting, method)]
        if not of:
            continue
        cells = ["", ""]
        if method not in (START, REFERENCE):
            cells = [verdict(difference(runs, setting, method, number)) for number in (training, held_out)]
        kinds = [points(float(np.mean([r["held_out"]["success_rate_by_type"][kind] for r in of]))) for kind in types]
        numbers = ", ".join(str(r["seed"]) for r in of)
        seeds, trained = ("", "") if method == START else (f"{len(of)} ({numbers})", spread([*map(training, of)]))
        tested = spread([*map(held_out, of)])
        lines.append(f"| {method} | {seeds} | {trained} | {cells[0]} | {tested} | {cells[1]} | {' | '.join(kinds)} |")
    return lines
