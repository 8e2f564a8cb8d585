"""The benchmark of credit against the truth: what it calls exact is, and estimators come in the expected order."""

import json

import numpy as np
import pytest

from benchmarks.common import RESULTS, read_text
from benchmarks.credit import truth, truth_figure
from benchmarks.credit.exact import Policy, Truth, success_rate
from benchmarks.credit.household import Household, play

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


def test_a_policy_wins_as_often_as_was_asked_for(policy):
    assert success_rate(policy) == pytest.approx(0.3, abs=1e-8)
    episodes = 20_000
    won = play(policy.house, policy.logits, episodes, policy.turns, policy.slip, np.random.default_rng(2)).won
    assert won.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / episodes))


def test_the_gradient_is_that_of_the_success_rate(policy):
    exact, rng = Truth.from_policy(policy).gradient, np.random.default_rng(3)
    for _ in range(3):
        way = rng.standard_normal(exact.shape)
        ahead, back = (success_rate(policy.moved(sign * 1e-5 * way)) for sign in (1, -1))
        assert (ahead - back) / 2e-5 == pytest.approx(float((exact * way).sum()), abs=1e-6)


def test_advantages_are_0_on_average_over_a_states_actions(policy):
    known, probabilities = Truth.from_policy(policy), policy.probabilities()
    assert np.abs((probabilities * known.advantages).sum(axis=2)).max() < 1e-6
    assert known.values[0, policy.house.start] == pytest.approx(0.3, abs=1e-8)


def test_the_step_that_wins_is_worth_what_was_missing(policy):
    known = Truth.from_policy(policy)
    state, action = np.argwhere(policy.house.wins & policy.house.admissible)[0]
    last = policy.turns - 1  # with the last turn to play, winning needs this action to have its effect
    missing = (1 - policy.slip) - known.values[last, state]
    assert known.advantages[last, state, action] == pytest.approx(missing, abs=1e-6)


def test_a_success_out_of_reach_is_refused(policy):
    with pytest.raises(ValueError, match="success is 0.999"):
        Policy.with_success(policy.house, 0.999, 6, 0.3, np.random.default_rng(1))


def test_the_true_advantage_has_no_error(measured):
    for house in measured:
        assert house["true advantage"]["correlation"] == pytest.approx(1)
        assert house["true advantage"]["error_bias"] == pytest.approx(0, abs=1e-9)
        assert house["true advantage"]["error_noise"] == pytest.approx(0, abs=1e-9)
    assert (cosines(measured, "true advantage") > cosines(measured, "g2po, λ 0.5")).all()


def test_g2po_is_nearer_to_the_truth_than_gigpo_and_gigpo_than_grpo(measured):
    """By several standard errors of the paired differences, in these four houses."""
    for better, worse in (("g2po", "gigpo"), ("gigpo", "grpo (A_EP)"), ("g2po, λ 0.5", "g2po")):
        difference = cosines(measured, better) - cosines(measured, worse)
        assert difference.mean() > 0.02 and (difference > 0).all(), (better, worse, difference)


def test_without_aggregation_the_node_term_is_gigpos(measured):
    for house in measured:
        assert house["A_EP + A_NC"]["cosine"] == pytest.approx(house["gigpo"]["cosine"], abs=1e-5)


def test_a_house_for_each_group(monkeypatch):
    """With mixed houses the exact gradient is the mean of theirs, and the true advantage points along it."""
    monkeypatch.setitem(truth.SETTINGS, "two houses", {"mixed": True, "groups": 2})
    (found,) = [truth.measure("two houses", 0, 3, ["true advantage"])["true advantage"]]
    assert found["cosine"] > 0.8 and found["error_bias"] == pytest.approx(0, abs=1e-9)


def test_the_figure_shows_the_published_means():
    results = json.loads(read_text(RESULTS / "truth/results.json"))["results"]
    left, *panels = truth_figure.drawn(results).axes
    dots = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    names = [name for name, *_ in reversed(truth_figure.ROWS)]
    assert dots == [np.mean(results["default"][name]["cosine"]["values"]) for name in names]
    drawn = [list(line.get_ydata()) for panel in panels for line in panel.lines]
    for _, settings in truth_figure.PANELS:
        for name in truth_figure.COLORS:
            assert [np.mean(results[setting][name]["cosine"]["values"]) for setting in settings] in drawn
