"""What holds of every estimator on any trajectories, found or refuted by hypothesis."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_graphs import ESTIMATORS

from g2po_trl import StateGraph, Step, Trajectory, edge_advantage, episode_advantage, node_advantage

STEPS = st.tuples(st.sampled_from("abcdef"), st.booleans())
REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 10.0]), st.floats(-1e6, 1e6, allow_subnormal=False))
# An episode that ended in an error may have no steps.
EPISODES = st.one_of(
    st.tuples(st.lists(STEPS, min_size=1, max_size=8), REWARDS, st.just(False)),
    st.tuples(st.lists(STEPS, max_size=3), REWARDS, st.just(True)),
)
GROUPS = st.lists(st.lists(EPISODES, min_size=1, max_size=5), min_size=1, max_size=3)
# gamma and value_lambda
VALUES = st.tuples(st.floats(0.1, 1.0), st.sampled_from([1.0, 0.9, 0.5, 0.0]))
quick = settings(max_examples=60, deadline=None)


def trajectories(groups, rename=str):
    def played(task, steps, reward, broken):
        made = [Step(rename(key), "go", valid=valid) for key, valid in steps]
        return Trajectory(task, made, reward, "error" if broken else "failure")

    return [[played(f"task {number}", *episode) for episode in group] for number, group in enumerate(groups)]


def by_trajectory(groups, values):
    """The advantages of each trajectory by each estimator, [group][trajectory] -> array (estimators, steps)."""
    graph = StateGraph.from_groups(groups, *values)
    advantages = np.stack([estimator(graph) for estimator in ESTIMATORS.values()])
    parts = iter(np.split(advantages, np.cumsum(graph.lengths)[:-1], axis=1))
    return [[next(parts) for _ in group] for group in groups]


def assert_same(first, second):
    for of_group, of_other in zip(first, second, strict=True):
        for one, other in zip(of_group, of_other, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@quick
@given(groups=GROUPS, values=VALUES, seed=st.integers(0, 99))
def test_order_of_trajectories_changes_nothing_and_errors_get_nothing(groups, values, seed):
    played = trajectories(groups)
    found = by_trajectory(played, values)
    for group, advantages in zip(groups, found):
        for (_, _, broken), of_steps in zip(group, advantages):
            assert np.isfinite(of_steps).all() and not (broken and of_steps.any())
    orders = [np.random.default_rng(seed).permutation(len(group)) for group in played]
    shuffled = by_trajectory([[group[i] for i in order] for group, order in zip(played, orders)], values)
    assert_same(shuffled, [[of_group[i] for i in order] for of_group, order in zip(found, orders)])


@quick
@given(groups=GROUPS, values=VALUES)
def test_other_groups_and_names_of_states_change_nothing(groups, values):
    found, renamed = by_trajectory(trajectories(groups), values), trajectories(groups, lambda key: f"<{ord(key) * 7}>")
    assert_same(found, [by_trajectory([group], values)[0] for group in renamed])


@quick
@given(groups=GROUPS, values=VALUES, scaled=st.booleans())
def test_comparisons_sum_to_zero(groups, values, scaled):
    """A_NC over the steps out of a node, A_EC over a group's steps, A_EP over its trajectories."""
    graph = StateGraph.from_groups(trajectories(groups), *values)
    scale = 1 + np.abs(graph.rewards).max(initial=0)
    used = graph.counted
    for sets, found in ((graph.node, node_advantage(graph, scaled)), (graph.group, edge_advantage(graph, scaled))):
        sums = np.bincount(sets[used], found[used])
        assert np.abs(sums).max(initial=0) < 1e-6 * scale * (1 + len(found))
    first = (graph.position == 0) & used
    sums = np.bincount(graph.group[first], episode_advantage(graph, scaled)[first], minlength=1)
    assert np.abs(sums).max() < 1e-6 * scale * (1 + len(first))
