"""The benchmark of credit against the truth: what it calls exact is, and estimators come in the expected order."""

import numpy as np
import pytest

from benchmarks.credit import truth
from benchmarks.credit.exact import Policy, Truth, success_rate
from benchmarks.credit.household import Household

HOUSES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def policy():
    house = Household.random(np.random.default_rng(0), places=4, distractors=1)
    return Policy.with_success(house, 0.3, 12, 0.1, np.random.default_rng(1))


@pytest.fixture(scope="module")
def measured():
    """[house][method] of a few iterations, for what is ordered."""
    methods = ["grpo (A_EP)", "gigpo", "A_EP + A_NC", "g2po", "g2po, λ 0.5", "true advantage"]
    return [truth.measure("default", house, 6, methods) for house in HOUSES]


def cosines(measured, method):
    return np.array([house[method]["cosine"] for house in measured])


def test_the_gradient_is_that_of_the_success_rate(policy):
    assert success_rate(policy) == pytest.approx(0.3, abs=1e-8), "as was asked for"
    exact, rng = Truth.from_policy(policy).gradient, np.random.default_rng(3)
    for _ in range(3):
        way = rng.standard_normal(exact.shape)
        ahead, back = (success_rate(policy.moved(sign * 1e-5 * way)) for sign in (1, -1))
        assert (ahead - back) / 2e-5 == pytest.approx(float((exact * way).sum()), abs=1e-6)


def test_the_true_advantage_has_no_error(measured):
    found = [
        [house["true advantage"][name] for name in ("correlation", "error_bias", "error_noise")] for house in measured
    ]
    np.testing.assert_allclose(found, [[1, 0, 0]] * len(HOUSES), atol=1e-9)


def test_g2po_is_nearer_to_the_truth_than_gigpo_and_gigpo_than_grpo(measured):
    """By several standard errors of the paired differences, in these four houses."""
    for better, worse in (("g2po", "gigpo"), ("gigpo", "grpo (A_EP)"), ("g2po, λ 0.5", "g2po")):
        difference = cosines(measured, better) - cosines(measured, worse)
        assert difference.mean() > 0.02 and (difference > 0).all(), (better, worse, difference)
