"""Values with lambda: golden cases, exact numbers by hand, a dense solve of the equations, what must not matter."""

import json
from pathlib import Path

import numpy as np
import pytest
from letter_graphs import GOLDEN_ADVANTAGES, episode, golden_graph, random_walks, solved_values

from g2po_trl import StateGraph, Trajectory, g2po
from g2po_trl.credit import values

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "values.json"
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="golden values are not beside the checkout")


def state_values(groups, graph) -> dict[tuple[int, str], float]:
    keys = [(g, step.key) for g, group in enumerate(groups) for trajectory in group for step in trajectory.steps]
    return {key: value for key, value, counted in zip(keys, graph.values, graph.counted) if counted}


@needs_golden
@pytest.mark.parametrize("value_lambda", ["0.0", "0.5", "0.9"])
def test_golden_values_and_advantages(value_lambda):
    graphs_of = {case["id"]: case for case in json.loads(GOLDEN_ADVANTAGES.read_text())["cases"]}
    cases = json.loads(GOLDEN.read_text())["cases"]
    assert len(cases) == 60
    for case in cases:
        graph = golden_graph(graphs_of[case["id"]], value_lambda=float(value_lambda))
        expected = {
            name: [x for group in by_group for trajectory in group for x in trajectory]
            for name, by_group in case["expected"][value_lambda].items()
        }
        np.testing.assert_allclose(graph.values, expected["value"], rtol=1e-4, atol=1e-4, err_msg=case["id"])
        given = graphs_of[case["id"]]
        advantages = g2po(graph, step_weight=given["w"], scale_by_std=given["scale_by_std"])
        np.testing.assert_allclose(advantages, expected["advantage"], rtol=1e-4, atol=1e-4, err_msg=case["id"])


def test_a_state_seen_once_is_worth_what_it_led_to():
    """x was reached once, by an episode that lost; it led to b, which won twice in three times."""
    groups = [[episode("xb", 0.0), episode("ab", 9.0), episode("ab", 9.0)]]
    assert state_values(groups, StateGraph.from_groups(groups, 0.5))[0, "x"] == 0.0
    graph = StateGraph.from_groups(groups, 0.5, value_lambda=0.0)
    # b: gamma (0 + 9 + 9) / 3 = 3; x and a: gamma x 3.
    np.testing.assert_allclose(graph.values, [1.5, 3, 1.5, 3, 1.5, 3], rtol=1e-12)
    np.testing.assert_allclose(graph.lambda_returns, [1.5, 0, 1.5, 4.5, 1.5, 4.5], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(graph.returns, [0, 0, 2.25, 4.5, 2.25, 4.5])
    half = StateGraph.from_groups(groups, 0.5, value_lambda=0.5)
    # x: gamma (V(b) / 2 + G / 2) with V(b) = 3, G = 0; a: G = 4.5.
    np.testing.assert_allclose(half.values, [0.75, 3, 1.875, 3, 1.875, 3], rtol=1e-12)


def test_a_loop_by_hand():
    """a -> a -> end with 8: V = (gamma V + gamma 8) / 2, at gamma 0.5 V = 2 / (1 - 1/4) = 8/3."""
    graph = StateGraph.from_groups([[episode("aa", 8.0)]], 0.5, value_lambda=0.0)
    np.testing.assert_allclose(graph.values, [8 / 3, 8 / 3], rtol=1e-12)
    np.testing.assert_allclose(graph.lambda_returns, [4 / 3, 4], rtol=1e-12)


def test_random_graphs_agree_with_a_dense_solve():
    compared = 0
    for seed in range(50):
        groups = random_walks(seed)
        for value_lambda in (0.0, 0.5, 0.9, 1.0):
            for gamma in (0.95, 1.0):
                expected = solved_values(groups, gamma, value_lambda)
                found = state_values(groups, StateGraph.from_groups(groups, gamma, value_lambda))
                assert found.keys() == expected.keys()
                np.testing.assert_allclose(
                    [found[key] for key in expected], list(expected.values()), rtol=1e-9, atol=1e-9
                )
                compared += len(expected)
    assert compared > 3_000


def test_lambda_one_is_the_mean_return_to_the_bit():
    groups = random_walks(0)
    plain, given = StateGraph.from_groups(groups), StateGraph.from_groups(groups, 0.95, value_lambda=1.0)
    for name in ("node_values", "returns", "lambda_returns"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(given, name))
    np.testing.assert_array_equal(given.lambda_returns, given.returns)
    # The equations at lambda = 1 have the mean return as their solution.
    limit = StateGraph.from_groups(groups, 0.95, value_lambda=1 - 1e-12)
    np.testing.assert_allclose(limit.node_values, given.node_values, rtol=1e-9, atol=1e-9)


def test_failures_without_steps_pay_nothing_to_any_node():
    unplayed = Trajectory("t", [], 0.0, "failure", failure_reason="the prompt does not fit")
    graph = StateGraph.from_groups([[unplayed, episode("ab", 10.0), unplayed]], 0.5, value_lambda=0.0)
    np.testing.assert_allclose(graph.values, [2.5, 5.0], rtol=1e-12)


def test_groups_are_solved_in_batches(monkeypatch):
    groups = random_walks(4, num_groups=12)
    whole = StateGraph.from_groups(groups, value_lambda=0.5).node_values
    monkeypatch.setattr(values, "_COEFFICIENTS", 500)
    np.testing.assert_allclose(StateGraph.from_groups(groups, value_lambda=0.5).node_values, whole, atol=1e-12)
