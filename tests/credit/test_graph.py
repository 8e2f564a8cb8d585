"""The state graph: nodes, values and returns by hand, records, errors, statistics."""

import pickle

import numpy as np
import pytest
from letter_graphs import episode

from g2po_trl import StateGraph, Step, Trajectory, g2po
from g2po_trl.credit import episode_advantage, node_advantage, rloo
from g2po_trl.credit.graph import hash_key, record


def test_arrays_by_hand():
    graph = StateGraph.from_groups([[episode("hkh", 8.0), episode("hb", 0.0)], [episode("h", 4.0, "u")]], gamma=0.5)
    assert (graph.num_groups, graph.num_steps, graph.num_nodes) == (2, 6, 4)
    # Nodes in order of first visit: h, k, b of group 0, h of group 1; then the terminal nodes 4, 5, 6.
    np.testing.assert_array_equal(graph.node, [0, 1, 0, 0, 2, 3])
    np.testing.assert_array_equal(graph.next_node, [1, 0, 4, 2, 5, 6])
    np.testing.assert_array_equal(graph.trajectory, [0, 0, 0, 1, 1, 2])
    np.testing.assert_array_equal(graph.group, [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(graph.position, [0, 1, 2, 0, 1, 0])
    np.testing.assert_array_equal(graph.returns, [1, 2, 4, 0, 0, 2])
    np.testing.assert_array_equal(graph.node_values, [5 / 3, 2, 0, 2, 8, 0, 4])
    np.testing.assert_array_equal(graph.values, [5 / 3, 2, 5 / 3, 5 / 3, 0, 2])
    np.testing.assert_array_equal(graph.next_values, [2, 5 / 3, 8, 0, 0, 4])
    np.testing.assert_array_equal(graph.node_visits, [3, 1, 1, 1])
    np.testing.assert_array_equal(graph.node_group, [0, 0, 0, 1])
    assert [key.tobytes() for key in graph.node_keys] == [hash_key(key) for key in "hkbh"]
    np.testing.assert_array_equal(graph.rewards, [8, 0, 4])
    np.testing.assert_array_equal(graph.lengths, [3, 2, 1])
    np.testing.assert_array_equal(graph.trajectory_group, [0, 0, 1])
    assert graph.valid.all() and graph.counted.all() and graph.trajectory_counted.all()


def test_state_keys_go_before_observations_and_are_compared_whole():
    texts = ["a" * 40_000, "a" * 40_000 + "b", "é", "e\u0301", "\ud800", "", " ", "\0"]
    steps = [*(Step(text, "go") for text in texts), Step("é", "go", state_key=""), Step("b", "go", state_key=" ")]
    graph = StateGraph.from_groups([[Trajectory("t", steps, 0.0, "failure")]])
    np.testing.assert_array_equal(graph.node, [*range(len(texts)), 5, 6])


@pytest.mark.parametrize("outcome", ["error", "lost"])
def test_trajectories_without_a_result_keep_their_place_and_enter_nothing(outcome):
    alone = StateGraph.from_groups([[episode("hk", 8.0), episode("h", 0.0)]], gamma=0.5)
    died = episode("hz", float("nan"), outcome=outcome)
    never_started = episode("", 0.0, outcome=outcome)
    graph = StateGraph.from_groups([[died, episode("hk", 8.0), never_started, episode("h", 0.0)]], gamma=0.5)
    np.testing.assert_array_equal(graph.counted, [False, False, True, True, True])
    np.testing.assert_array_equal(graph.trajectory_counted, [False, True, False, True])
    np.testing.assert_array_equal(graph.trajectory, [0, 0, 1, 1, 3])
    np.testing.assert_array_equal(graph.node, [-1, -1, 0, 1, 0])
    np.testing.assert_array_equal(graph.next_node, [-1, -1, 1, 3, 5])
    np.testing.assert_array_equal(graph.returns[:2], [0, 0])
    np.testing.assert_array_equal(graph.values, [0, 0, *alone.values])
    np.testing.assert_array_equal(graph.next_values, [0, 0, *alone.next_values])
    assert graph.statistics() == alone.statistics()


def test_an_episode_that_failed_before_its_first_step_counts_for_the_others():
    """Its first prompt could not be made to fit: it has no node, and the others are compared with it."""
    never_started = Trajectory("t", [], 0.0, "failure", failure_reason="prompt too long")
    graph = StateGraph.from_groups([[episode("hk", 8.0), never_started, episode("h", 4.0)]], gamma=0.5)
    alone = StateGraph.from_groups([[episode("hk", 8.0), episode("h", 4.0)]], gamma=0.5)
    np.testing.assert_array_equal(graph.trajectory_counted, [True] * 3)
    np.testing.assert_array_equal(graph.lengths, [2, 0, 1])
    np.testing.assert_array_equal(graph.trajectory, [0, 0, 2])
    np.testing.assert_array_equal(graph.node, alone.node)
    np.testing.assert_array_equal(graph.next_node, [1, 2, 4])
    np.testing.assert_array_equal(graph.next_values, alone.next_values)
    np.testing.assert_allclose(episode_advantage(graph, scale_by_std=False), [4, 4, 0], err_msg="the mean of 8, 0, 4")
    np.testing.assert_allclose(rloo(graph), [6, 6, 0])
    np.testing.assert_array_equal(node_advantage(graph), node_advantage(alone))
    only = StateGraph.from_groups([[never_started, never_started]])
    assert only.num_steps == 0 and len(g2po(only)) == 0 and set(only.statistics().values()) == {0.0}


@pytest.mark.parametrize("value_lambda", [1.0, 0.0])
def test_nothing_but_errors_is_an_empty_graph(value_lambda):
    errors = [episode("", 0.0, outcome="error"), episode("a", 1.0, outcome="error")]
    graph = StateGraph.from_groups([errors], value_lambda=value_lambda)
    assert (graph.num_nodes, graph.num_steps) == (0, 1)
    assert set(graph.statistics().values()) == {0.0} and not graph.values.any() and not g2po(graph).any()
    assert StateGraph.from_groups([errors[:1]], value_lambda=value_lambda).num_steps == 0


def test_records_are_small_pickle_and_give_the_same_graph():
    long = "You are in the middle of a room. " * 1000
    steps = [Step(f"{long}{i % 3}", "go", valid=i % 4 > 0) for i in range(50)]
    groups = [[Trajectory("t", steps[:n], float(n), "success") for n in (50, 20)]]
    records = [[record(trajectory) for trajectory in group] for group in groups]
    sent = pickle.dumps(records)
    assert len(sent) < 50 * (50 + 20)
    graph, other = StateGraph.from_groups(groups), StateGraph.from_records(pickle.loads(sent))
    for name in ("node", "next_node", "valid", "returns", "node_values", "trajectory", "group"):
        np.testing.assert_array_equal(getattr(graph, name), getattr(other, name))
    np.testing.assert_array_equal(graph.valid[:50], [step.valid for step in steps])


def test_statistics_by_hand():
    # Visits: h 3, k 1, b 1. Returns in h 1, 4, 0 around 5/3; the others are on their node's value.
    graph = StateGraph.from_groups([[episode("hkh", 8.0), episode("hb", 0.0)]], gamma=0.5)
    squares = (1 - 5 / 3) ** 2 + (4 - 5 / 3) ** 2 + (5 / 3) ** 2
    assert graph.statistics() == pytest.approx(
        {
            "nodes": 3,
            "mean_group_size": 5 / 3,
            "singleton_step_fraction": 2 / 5,
            "value_std_within_node": (squares / 5) ** 0.5,
        }
    )
