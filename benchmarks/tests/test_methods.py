"""The earlier comparison of methods: its statistics by hand; and locks of runs."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from benchmarks.learning import methods as bench
from benchmarks.learning.methods_report import (
    bootstrap_interval,
    difference,
    differences_with_one_spread,
    held_out,
    table,
    training,
    verdict,
)
from benchmarks.learning.recipe_runs import Busy, lock

KINDS = list(bench.TYPES)


def made(values: dict, setting: str = "short") -> dict:
    """Runs of a setting. `values`: method -> mean of training, one a seed; held-out is 0.1 above."""
    return {
        (setting, method, seed): {
            "setting": setting,
            "method": method,
            "seed": seed,
            "training": {"success": [value - 0.2, value + 0.2]},
            "held_out": {
                "success_rate": value + 0.1,
                "success_rate_by_type": dict.fromkeys(KINDS, value),
                "turns_to_success": 7.0,
            },
            "commit": "0123456789abcdef",
            "seconds": 360.0,
        }
        for method, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    }


def test_bootstrap_interval_is_that_of_all_draws():
    values = [0.3, -0.1, 0.4, 0.05]
    means = np.sort([np.mean(draw) for draw in product(values, repeat=4)])
    low, high = bootstrap_interval(values)
    # The smallest mean with at least 2.5 % (97.5 %) of the 256 draws at or below it: the 7th and the 250th.
    assert low == pytest.approx(means[6]) and high == pytest.approx(means[249])
    assert bootstrap_interval([0.2, 0.4]) == pytest.approx((0.2, 0.4)), "1/4 of the draws at either end"
    assert bootstrap_interval([0.2]) is None
    low, high = bootstrap_interval(list(range(8)))
    assert 3.5 - low == pytest.approx(high - 3.5) and 1.4 < high - 3.5 < 1.7, "about 1.96 × 2.29 / √8"


def test_differences_are_paired_and_told_apart_by_both_intervals():
    runs = made(
        {"g2po": [0.6, 0.7, 0.5, 0.6], "grpo": [0.50, 0.61, 0.39, 0.5, 0.9], "gigpo": [0.59, 0.62, 0.46, 0.40]}
    )
    found = difference(runs, "short", "grpo", training)
    assert found["seeds"] == [0, 1, 2, 3], "seed 4 has no partner"
    assert found["values"] == pytest.approx([-0.1, -0.09, -0.11, -0.1]) and found["apart"]
    # Distances from the mean are half-steps of 8 coins: 3.5 % of the draws are 3/4 of a point or more below it.
    assert found["interval"] == pytest.approx((-0.1075, -0.0925))
    assert verdict(found).startswith("-10.0 [-10.") and verdict(found).endswith("] **told apart**")
    found = difference(runs, "short", "gigpo", held_out)
    assert found["values"] == pytest.approx([-0.01, -0.08, -0.04, -0.2])
    assert found["interval"][1] < 0 < found["t_interval"][1] and not found["apart"], "four of one sign are not enough"
    assert verdict(difference(made({"g2po": [0.6], "grpo": [0.5]}), "short", "grpo", training)) == "-10.0 (one seed)"
    assert difference(runs, "long", "grpo", training) is None


def test_one_spread_for_all_methods_by_hand():
    """Balanced: differences of means, the noise what method and seed leave, Student's interval with its freedom."""
    values = np.array([[0.60, 0.70, 0.50], [0.50, 0.62, 0.38], [0.58, 0.62, 0.51]])
    runs = made(dict(zip(["g2po", "grpo", "gigpo"], values.tolist(), strict=True)) | {"g2po lambda auto": values[0]})
    found = differences_with_one_spread(runs, "short", ["grpo", "gigpo", "g2po", "g2po lambda auto"], training)
    left = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    spread = np.sqrt((left**2).sum() / 4)
    assert found["spread"] == pytest.approx(spread) and found["freedom"] == 4 and found["seeds"] == [0, 1, 2]
    assert set(found["of"]) == {"grpo", "gigpo"}, "auto does g2po's runs over again"
    half = 2.77645 * spread * np.sqrt(2 / 3)
    assert found["of"]["grpo"]["mean"] == pytest.approx(-0.1)
    assert found["of"]["grpo"]["interval"] == pytest.approx((-0.1 - half, -0.1 + half), abs=1e-5)
    alone = [2 * stats.t.sf(abs(mean) / spread / np.sqrt(2 / 3), 4) for mean in (-0.1, -0.03)]
    assert [of["p"] for of in found["of"].values()] == pytest.approx([2 * alone[0], alone[1]]), "Holm"
    del runs["short", "gigpo", 1]
    found = differences_with_one_spread(runs, "short", ["grpo", "gigpo", "g2po", "g2po lambda auto"], training)
    missing = (3 * (0.58 + 0.51) + 3 * (0.70 + 0.62) - (values.sum() - 0.62)) / 4  # Yates: what least squares expects
    assert found["of"]["gigpo"]["mean"] == pytest.approx((0.58 + missing + 0.51) / 3 - 0.6)
    assert found["freedom"] == 3
    runs = made({"g2po": [0.6], "grpo": [0.5]})
    assert differences_with_one_spread(runs, "short", ["grpo", "g2po"], training) is None


def test_one_spread_covers_what_it_says():
    """Ten methods of equal worth, four seeds: 5 % of intervals are without 0, 5 % of tables have one p under 0.05."""
    rng, names = np.random.default_rng(0), ["g2po", *(f"method {i}" for i in range(9))]
    outside, tables, repetitions = 0, 0, 400
    for _ in range(repetitions):
        values = 0.5 + rng.normal(0, 0.03, 4) + rng.normal(0, 0.02, (10, 4))
        of = differences_with_one_spread(made(dict(zip(names, values, strict=True))), "short", names, training)["of"]
        outside += sum(found["interval"][0] > 0 or found["interval"][1] < 0 for found in of.values())
        tables += min(found["p"] for found in of.values()) < 0.05
    assert 0.035 < outside / repetitions / 9 < 0.065 and 0.01 < tables / repetitions < 0.07


def test_table_says_how_many_seeds(tmp_path):
    lines = table(made({"g2po": [0.6, 0.7], "grpo": [0.5]}), "short", ["grpo", "ppo", "g2po"], bench.TYPES)
    assert len(lines) == 4, "no row without a run"
    assert lines[2].startswith("| grpo | 1 (0) | 50.0 | -10.0 (one seed) | 60.0 | -10.0 (one seed) |")
    assert lines[3].startswith("| g2po | 2 (0, 1) | 65.0 ± 7.1 |  | 75.0 ± 7.1 |")


def test_a_run_that_another_process_plays_is_busy(tmp_path):
    with lock(tmp_path / "lock"):
        with pytest.raises(Busy), lock(tmp_path / "lock"):
            pass
    with lock(tmp_path / "lock"):
        pass
