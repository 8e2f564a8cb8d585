"""The statistics of `comparison.py`: pure functions of numbers by (arm, seed), tested by hand and against scipy.

Many arms are compared with one, the reference, by Dunnett's test for randomised blocks. A block is a seed: its tasks
and their order are the same for all arms. The model is number = arm + seed + noise with one noise for all arms, fitted
by least squares; the estimated differences over their standard errors then follow a multivariate t distribution. For
complete blocks this is the textbook test on (arms - 1)(seeds - 1) degrees of freedom, and with the seeds left out of
the model it is `scipy.stats.dunnett`; runs that are missing only change the standard errors and their correlations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

Numbers = Mapping[tuple[str, int], float]  # (arm, seed) -> number
COLLAPSED = {"valid": 0.95, "kl": 0.5}  # a run below the first or above the second in any iteration


@dataclass(frozen=True)
class Difference:
    """An arm's mean less the reference's.

    Args:
        mean: least-squares estimate.
        interval: simultaneous for all arms.
        p: two-sided, corrected for the number of arms.
    """

    mean: float
    interval: tuple[float, float]
    p: float

    @property
    def significant(self) -> bool:
        """Return whether p is below 5 %."""
        return self.p < 0.05


@dataclass(frozen=True)
class Comparison:
    """All arms against the reference: `noise`, the standard deviation of a run, on `freedom` degrees of freedom."""

    differences: dict[str, Difference]
    noise: float
    freedom: int


def dunnett(numbers: Numbers, reference: str, blocks: bool = True, confidence: float = 0.95) -> Comparison | None:
    """Return every arm's difference to the reference by Dunnett's two-sided test.

    Args:
        numbers: one for each run.
        reference: the arm that the others are compared with.
        blocks: include the seeds in the model.

    Returns:
        `None` if there are too few runs to estimate the noise, or an arm shares no block with the others.
    """
    runs = sorted(numbers)
    others = list(dict.fromkeys(arm for arm, _ in numbers if arm != reference))
    seeds = sorted({seed for _, seed in runs}) if blocks else []
    if not others or all(arm != reference for arm, _ in runs):
        return None
    # Columns: the other arms, then one for each block, which together hold the constant.
    arms = np.array([[arm == other for other in others] for arm, _ in runs], dtype=float)
    constant = (
        np.array([[seed == s for s in seeds] for _, seed in runs], dtype=float) if blocks else np.ones((len(runs), 1))
    )
    design, values = np.hstack([arms, constant]), np.array([numbers[run] for run in runs])
    freedom = len(runs) - design.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.inv(design.T @ design)
    effects = inverse @ design.T @ values
    noise = float(np.sqrt(np.sum((values - design @ effects) ** 2) / freedom))
    scale = np.sqrt(np.diag(inverse)[: len(others)])
    correlation = inverse[: len(others), : len(others)] / np.outer(scale, scale)
    means, errors = effects[: len(others)], noise * scale
    half = critical_value(correlation, freedom, confidence) * errors
    statistics = np.abs(means) / errors if noise > 0 else np.where(means == 0, 0.0, np.inf)
    found = {
        arm: Difference(float(m), (float(m - h), float(m + h)), max(0.0, 1 - within(float(t), correlation, freedom)))
        for arm, m, h, t in zip(others, means, half, statistics)
    }
    return Comparison(found, noise, freedom)


def within(limit: float, correlation: np.ndarray, freedom: int) -> float:
    """Return the probability that no |t| of a multivariate t distribution exceeds `limit`."""
    if np.isinf(limit):
        return 1.0
    upper = np.full(len(correlation), limit)
    joint = stats.multivariate_t(shape=correlation, df=freedom)
    # Integrated by quasi-random points: a fixed seed gives the same digits each time.
    return float(joint.cdf(upper, lower_limit=-upper, maxpts=20_000, random_state=np.random.default_rng(0)))


def critical_value(correlation: np.ndarray, freedom: int, confidence: float = 0.95) -> float:
    """Return the |t| that no comparison exceeds with the probability `confidence` if no arm differs."""
    single = stats.t.ppf((1 + confidence) / 2, freedom)
    bonferroni = stats.t.ppf(1 - (1 - confidence) / 2 / len(correlation), freedom)
    if len(correlation) == 1:
        return float(single)
    return float(
        optimize.brentq(
            lambda t: within(t, correlation, freedom) - confidence, 0.99 * single, 1.01 * bonferroni, xtol=1e-4
        )
    )


def smallest_effect(noise: float, seeds: int, comparisons: int, power: float = 0.8) -> float:
    """Return the true difference that Dunnett's test in complete blocks finds with probability `power`.

    Args:
        noise: standard deviation of a run, in any unit; the result has the same.
        seeds: of every arm.
        comparisons: arms besides the reference.
    """
    freedom = comparisons * (seeds - 1)
    limit = critical_value((np.eye(comparisons) + 1) / 2, freedom)

    # The other tail, a significant difference of the wrong sign, is negligible here.
    shift = optimize.brentq(lambda shift: stats.nct.sf(limit, freedom, shift) - power, 0, limit + 5)
    return float(shift * noise * np.sqrt(2 / seeds))


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return Student's interval of the mean difference over seeds; `None` for fewer than two, and for equal ones."""
    if len(set(differences)) < 2:
        return None
    mean, error = np.mean(differences), stats.sem(differences)
    half = stats.t.ppf((1 + confidence) / 2, len(differences) - 1) * error
    return float(mean - half), float(mean + half)


def first_half(success: Sequence[float]) -> float:
    """Return the mean of the first half of the iterations, the middle one of an odd number included."""
    return float(np.mean(success[: (len(success) + 1) // 2]))


def first_at(success: Sequence[float], level: float = 0.8, window: int = 3) -> int | None:
    """Return the first iteration, from 1, at which the mean of the last `window` reaches `level`; `None`: never."""
    for end in range(window, len(success) + 1):
        if np.mean(success[end - window : end]) >= level - 1e-9:
            return end
    return None


def collapsed(training: Mapping[str, Sequence[float | None]]) -> bool:
    """Return whether a run lost its format: valid completions below 95 % or a KL above 0.5 in any iteration."""
    valid = [value for value in training.get("valid", ()) if value is not None]
    kl = [value for value in training.get("kl", ()) if value is not None]
    return min(valid, default=1.0) < COLLAPSED["valid"] or max(kl, default=0.0) > COLLAPSED["kl"]
