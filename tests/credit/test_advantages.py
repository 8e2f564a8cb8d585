"""Advantages: the golden cases of both conventions, exact numbers by hand, and what must not matter."""

import json

import numpy as np
import pytest
from letter_graphs import (
    ESTIMATORS,
    GOLDEN_ADVANTAGES,
    HAND,
    RELEASED,
    ROWS,
    episode,
    golden_graph,
    graph_of,
    random_groups,
)

from g2po_trl import crbc, edge_advantage, episode_advantage, g2po, gigpo, grpo, node_advantage, rloo

needs_golden = pytest.mark.skipif(not GOLDEN_ADVANTAGES.exists(), reason="no golden advantages beside the checkout")


def golden_cases(convention: str) -> list:
    """Cases of a convention; the released code gives NaN for a few, which have none."""
    cases = json.loads(GOLDEN_ADVANTAGES.read_text())["cases"] if GOLDEN_ADVANTAGES.exists() else []
    return [pytest.param(case, id=case["id"]) for case in cases if case["expected"][convention] is not None]


def flat(expected) -> np.ndarray:
    """The numbers of nested lists, in order."""
    return np.array([x for part in expected for x in flat(part)] if isinstance(expected, list) else [expected])


def assert_close(actual: np.ndarray, expected, name: str):
    np.testing.assert_allclose(actual, flat(expected), rtol=1e-4, atol=1e-4, err_msg=name)


@needs_golden
def test_no_golden_case_is_missed():
    assert len(golden_cases("paper")) == 60
    assert len(golden_cases("released")) == 55


@needs_golden
@pytest.mark.parametrize("case", golden_cases("paper"))
def test_paper_convention(case):
    graph, w, scale = golden_graph(case), case["w"], case["scale_by_std"]
    computed = {
        "value": graph.values,
        "delta": graph.next_values - graph.values,
        "EP": episode_advantage(graph, scale),
        "NC": node_advantage(graph, scale),
        "EC": edge_advantage(graph, scale),
        "advantage": g2po(graph, w, scale),
        "grpo": grpo(graph, scale),
        "rloo": rloo(graph),
        "gigpo": gigpo(graph, w, scale),
    }
    assert set(computed) == set(case["expected"]["paper"][0])
    for name, actual in computed.items():
        assert_close(actual, [group[name] for group in case["expected"]["paper"]], name)


@needs_golden
@pytest.mark.parametrize("case", golden_cases("released"))
def test_released_convention(case):
    graph, expected = golden_graph(case), case["expected"]["released"]
    actual = g2po(graph, case["w"], case["scale_by_std"], case["invalid_action_penalty"], "step")
    assert_close(graph.values, expected["value"], "value")
    assert_close(actual, expected["advantage"], "advantage")


# gamma 1/2: V(h) = (2 + 0) / 2 = 1, V(k) = 4; next values 4, 8 | 0; deltas 3, 4 | -1.
def test_parts_by_hand():
    graph = graph_of(HAND)
    np.testing.assert_array_equal(episode_advantage(graph, scale_by_std=False), [4, 4, -4])
    # With step statistics, a long episode counts more than once.
    of_steps = episode_advantage(graph, scale_by_std=False, episode_statistics="step")
    np.testing.assert_allclose(of_steps, [8 / 3, 8 / 3, -16 / 3], rtol=1e-12)
    np.testing.assert_array_equal(node_advantage(graph, scale_by_std=False), [2, 0, -2])
    np.testing.assert_array_equal(edge_advantage(graph, scale_by_std=False), [1, 2, -3])
    # Divided by the sample standard deviation.
    np.testing.assert_allclose(episode_advantage(graph), np.array([4, 4, -4]) / (np.sqrt(32) + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(node_advantage(graph), np.array([2, 0, -2]) / (np.sqrt(8) + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(edge_advantage(graph), np.array([1, 2, -3]) / (np.sqrt(7) + 1e-6), rtol=1e-12)


def test_estimators_by_hand():
    graph = graph_of(HAND)
    np.testing.assert_array_equal(g2po(graph, scale_by_std=False), [7, 6, -9])
    np.testing.assert_array_equal(g2po(graph, step_weight=0.5, scale_by_std=False), [5.5, 5, -6.5])
    np.testing.assert_array_equal(gigpo(graph, scale_by_std=False), [6, 4, -6])
    np.testing.assert_array_equal(grpo(graph, scale_by_std=False), [4, 4, -4])
    np.testing.assert_array_equal(rloo(graph), [8, 8, -8])


@pytest.mark.parametrize("reward", [0.1, 0.7, -0.3, 10.0, 1e-7])
def test_leave_one_out_of_equal_rewards_is_nothing(reward):
    """Not their rounding: with beta 0, rows of advantage 0 do not pass through the model."""
    graph = graph_of([episode("ab", reward) for _ in range(8)], [episode("a", r) for r in (0.1, 0.2, 0.3, 0.0)])
    advantage = rloo(graph)
    np.testing.assert_array_equal(advantage[:16], 0)
    np.testing.assert_allclose(advantage[16:], [-1 / 15, 1 / 15, 0.2, -0.2], rtol=1e-12)


def test_penalty_of_an_invalid_step_by_hand():
    graph = graph_of([episode("hk", 8.0, invalid={0}), episode("h", 0.0)])
    # Rewards 8, 8 | 0; next values out of h 4 | 0; step returns in h 4 | 0. With step statistics 1 less for the first.
    np.testing.assert_array_equal(episode_advantage(graph, False, 1.0), [3, 4, -4])
    np.testing.assert_array_equal(episode_advantage(graph, False, 1.0, "step"), [2, 3, -5])
    np.testing.assert_array_equal(node_advantage(graph, False, 1.0), [1.5, 0, -1.5])
    np.testing.assert_array_equal(gigpo(graph, 1.0, False, 1.0), [5, 4, -6])
    np.testing.assert_array_equal(gigpo(graph, 1.0, False, 1.0, "step"), [3.5, 3, -6.5])
    np.testing.assert_array_equal(g2po(graph, 1.0, False, 1.0), [3 + 2 + 1, 4 + 2, -4 - 2 - 3])
    np.testing.assert_array_equal(rloo(graph, 1.0), [7, 8, -8])
    np.testing.assert_array_equal(edge_advantage(graph, False), [1, 2, -3])


def test_a_loop_compares_its_own_visits():
    # Returns 1, 2, 4: V(a) = 2.5, V(b) = 2; next values out of a: 2 and 8.
    graph = graph_of([episode("aba", 8.0)])
    np.testing.assert_array_equal(node_advantage(graph, scale_by_std=False), [-3, 0, 3])
    np.testing.assert_allclose(edge_advantage(graph, False), np.array([-0.5, 0.5, 5.5]) - 5.5 / 3, rtol=1e-12)
    np.testing.assert_array_equal(episode_advantage(graph), [0, 0, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_single_step_has_no_advantage(name):
    np.testing.assert_array_equal(ESTIMATORS[name](graph_of([episode("a", 10.0)])), [0])


# In rloo nothing is divided; estimators with a discount of their own tell a longer way from a shorter one.
UNDISCOUNTED = {name: of for name, of in ESTIMATORS.items() if name == "grpo" or ROWS[name.split()[0]].uses_gamma}
UNDISCOUNTED |= {"crbc": lambda graph: crbc(graph, gamma=1.0, least_std=0.0)}  # what it solves for is rounded, too


@pytest.mark.parametrize("name", UNDISCOUNTED)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e6, -0.7])
def test_equal_to_rounding_is_no_spread(name, reward):
    # Sums are rounded: without a tolerance the noise would be divided by its own deviation.
    rewards = [reward, np.nextafter(reward, 2 * reward)]
    group = [episode("abcab"[: 1 + i % 5], rewards[i % 2]) for i in range(7)]
    advantage = UNDISCOUNTED[name](graph_of(group, gamma=1.0))
    np.testing.assert_array_equal(advantage, np.zeros_like(advantage))


def test_penalty_alone_is_a_spread_but_an_equal_one_is_not():
    some = graph_of([episode("ab", 0.0, invalid={0}), episode("ab", 0.0)])
    assert episode_advantage(some, True, 0.1, "step")[0] < -1
    every = graph_of([episode("ab", 0.0, invalid={0, 1}), episode("a", 0.0, invalid={0})])
    np.testing.assert_array_equal(g2po(every, **RELEASED), [0, 0, 0])


def test_penalty_stays_small_in_a_group_that_differs_in_nothing_else():
    graph = graph_of([episode("abcdefgh", 0.0, invalid={3}), episode("ab", 0.0), episode("ab", 0.0)])
    expected = np.zeros(12)
    expected[3] = -0.1
    np.testing.assert_array_equal(g2po(graph, invalid_action_penalty=0.1), expected)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_error_trajectories_leave_the_others_unchanged(name):
    groups = random_groups(np.random.default_rng(3))
    expected = ESTIMATORS[name](graph_of(*groups))
    broken = []
    for group in groups:
        died = episode("abcz", float("nan"), group[0].task_id, "error", invalid={1})
        never_started = episode("", 5.0, group[0].task_id, "error")
        broken.append([died, *group, never_started])
    graph = graph_of(*broken)
    advantage = ESTIMATORS[name](graph)
    np.testing.assert_array_equal(advantage[~graph.counted], np.zeros(4 * len(groups)))
    np.testing.assert_allclose(advantage[graph.counted], expected, atol=1e-12)


def test_without_aggregation_by_hand():
    """Two episodes a -> b -> 10 and a -> c -> 0, gamma 0.5: a step's own return stands in for its node's mean."""
    graph = graph_of([episode("ab", 10.0), episode("ac", 0.0)])
    assert graph.returns.tolist() == [2.5, 5.0, 0.0, 0.0]
    assert graph.next_lambda_returns.tolist() == [5.0, 10.0, 0.0, 0.0]
    node = node_advantage(graph, scale_by_std=False, aggregate=False)
    edge = edge_advantage(graph, scale_by_std=False, aggregate=False)
    assert node.tolist() == [2.5, 0.0, -2.5, 0.0]
    assert edge.tolist() == [0.625, 3.125, -1.875, -1.875]
    aggregated = edge_advantage(graph, scale_by_std=False)  # V(a) = 1.25: gains 3.75, 5, -1.25, 0
    assert aggregated.tolist() == [1.875, 3.125, -3.125, -1.875]


def test_ablations_leave_out_their_part():
    graph = graph_of(*random_groups(np.random.default_rng(0)))
    episodes, node, edge = episode_advantage(graph), node_advantage(graph), edge_advantage(graph)
    assert np.allclose(g2po(graph, 2.0, node_centric=False), episodes + 2 * edge)
    assert np.allclose(g2po(graph, 2.0, edge_centric=False), episodes + 2 * node)
    assert np.allclose(g2po(graph, node_centric=False, edge_centric=False), grpo(graph))
    assert not np.allclose(g2po(graph, aggregate=False), g2po(graph))
