"""GraphGPO, HGPO and CRBC: exact numbers by hand, and against slow implementations that know no arrays."""

import math
from collections import defaultdict

import numpy as np
import pytest
from letter_graphs import HAND, episode, graph_of, random_groups

from g2po_trl import Trajectory, crbc, episode_advantage, g2po, gigpo, graphgpo, grpo, hgpo, node_advantage
from g2po_trl.credit.estimators.graphgpo import success_distance
from g2po_trl.credit.estimators.rewardflow import propagated_rewards, rewardflow

SCALES = [True, False]


# --- slow implementations -------------------------------------------------------------------------------------------


def standardised(value: float, values: list[float], scale: bool, ddof: int, least: float = 0.0) -> float:
    """0 for a set of one and for equal values."""
    if len(values) < 2 or max(values) - min(values) < 1e-9:
        return 0.0
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))
    return (value - mean) / ((max(std, least) + 1e-6) if scale else 1.0)


def whole(trajectory: Trajectory) -> bool:
    return trajectory.outcome != "error"


def transitions(group: list[Trajectory]) -> list[list[tuple]]:
    """(node, next node) of each step; the end of trajectory i is ("end", i)."""
    found = []
    for number, trajectory in enumerate(group):
        keys = [step.key for step in trajectory.steps]
        found.append(list(zip(keys, [*keys[1:], ("end", number)])))
    return found


def slow_episode(group: list[Trajectory], scale: bool) -> list[float]:
    rewards = [t.reward for t in group if whole(t)]
    return [standardised(t.reward, rewards, scale, 1) if whole(t) else 0.0 for t in group]


def slow_comparison(group: list[Trajectory], worth: dict, scale: bool, ddof: int, least=0.0) -> list[list[float]]:
    """worth[next node] of each step among all steps out of its node."""
    edges = transitions(group)
    sets = defaultdict(list)
    for trajectory, steps in zip(group, edges):
        for node, after in steps:
            if whole(trajectory):
                sets[node].append(worth[after])
    return [
        [standardised(worth[after], sets[node], scale, ddof, least) for node, after in steps]
        if whole(t)
        else [0.0] * len(steps)
        for t, steps in zip(group, edges)
    ]


def slow_distances(group: list[Trajectory]) -> dict:
    """Bellman-Ford over the set of edges."""
    edges = {edge for t, steps in zip(group, transitions(group)) if whole(t) for edge in steps}
    distance = {end: math.inf for edge in edges for end in edge}
    for number, trajectory in enumerate(group):
        if whole(trajectory) and trajectory.reward > 0 and trajectory.steps:
            distance["end", number] = 0
    for _ in distance:
        for node, after in edges:
            distance[node] = min(distance[node], distance[after] + 1)
    furthest = max((d for d in distance.values() if d < math.inf), default=0)
    return {node: furthest + 1 if d == math.inf else d for node, d in distance.items()}


def slow_graphgpo(group, scale, weight, omega) -> list[float]:
    distance = slow_distances(group)
    best = max([0.0, *(t.reward for t in group if whole(t))])
    worth = {node: best * omega**d for node, d in distance.items()}
    parts = slow_comparison(group, worth, scale, 1) if distance else [[0.0] * len(t.steps) for t in group]
    return [a + weight * x for a, steps in zip(slow_episode(group, scale), parts) for x in steps]


def slow_rewardflow(group, scale, weight, decay) -> list[float]:
    """V by breadth-first search from each end of a trajectory, backwards over the set of edges."""
    edges = {edge for t, steps in zip(group, transitions(group)) if whole(t) for edge in steps}
    worth = {end: 0.0 for edge in edges for end in edge}
    for number, trajectory in enumerate(group):
        if not (whole(trajectory) and trajectory.steps):
            continue
        worth["end", number] = trajectory.reward
        seen, level = {("end", number)}, 0
        reached = set(seen)
        while reached:
            for node in reached:
                worth[node] = max(worth[node], decay**level * trajectory.reward)
            reached = {node for node, after in edges if after in reached} - seen
            seen, level = seen | reached, level + 1
    parts = slow_comparison(group, worth, scale, 1) if worth else [[0.0] * len(t.steps) for t in group]
    return [a + weight * x for a, steps in zip(slow_episode(group, scale), parts) for x in steps]


def slow_hgpo(group, scale, gamma, history, alpha) -> list[float]:
    def contexts(trajectory, j):
        keys = [step.key for step in trajectory.steps]
        return [tuple(keys[j - k : j + 1]) for k in range(history + 1) if j >= k]

    sets = defaultdict(list)
    for t in filter(whole, group):
        for j in range(len(t.steps)):
            for context in contexts(t, j):
                sets[context].append(gamma ** (len(t.steps) - 1 - j) * t.reward)
    advantages = []
    for t in group:
        for j in range(len(t.steps)):
            parts = []
            for context in contexts(t, j) if whole(t) else []:
                values = sets[context]
                if len(values) > 1 and max(values) - min(values) > 1e-9:
                    value = standardised(gamma ** (len(t.steps) - 1 - j) * t.reward, values, scale, 0)
                    parts.append((len(context) ** alpha, value))
            advantages.append(sum(w * a for w, a in parts) / sum(w for w, _ in parts) if parts else 0.0)
    return advantages


def slow_crbc(group, scale, weight, gamma, least) -> list[float]:
    """V by a dense solve of (I - gamma P) V = gamma r, P and r the shares of the transitions out of each node."""
    edges = [edge for t, steps in zip(group, transitions(group)) if whole(t) for edge in steps]
    nodes = sorted({node for node, _ in edges})
    matrix, constant = np.eye(len(nodes)), np.zeros(len(nodes))
    for node, after in edges:
        share = gamma / sum(other == node for other, _ in edges)
        if isinstance(after, tuple):
            constant[nodes.index(node)] += share * group[after[1]].reward
        else:
            matrix[nodes.index(node), nodes.index(after)] -= share
    worth = dict(zip(nodes, np.linalg.solve(matrix, constant)))
    worth.update({("end", i): t.reward for i, t in enumerate(group)})
    largest = max([0.0, *(abs(t.reward) for t in group if whole(t))])
    parts = slow_comparison(group, worth, scale, 0, least * largest)
    return [a + weight * x for a, steps in zip(slow_episode(group, scale), parts) for x in steps]


def groups_with_all(seed: int) -> list[list[Trajectory]]:
    """Loops, self-loops, several successes of different worth, groups without any, losses, errors."""
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, num_groups=4, group_size=6)
    for t in groups[1]:
        t.reward = 0.0
    for t in groups[2]:
        t.reward = float(rng.choice([-5.0, 0.0, 2.0]))
    for number, group in enumerate(groups):
        group.insert(int(rng.integers(6)), episode("aabz", 99.0, f"task {number}", "error"))
    groups[3].append(episode("", float("nan"), "task 3", "error"))
    return groups


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(25))
def test_equal_to_slow_implementations(seed, scale):
    groups = groups_with_all(seed)
    rng = np.random.default_rng(seed)
    weight, omega, gamma = rng.uniform(0, 5), rng.uniform(0.05, 0.9), rng.uniform(0.2, 1)
    history, alpha, least = int(rng.integers(4)), rng.uniform(0, 2), rng.choice([0.0, 0.01, 0.2])
    graph = graph_of(*groups, gamma=gamma)
    for name, actual, slow in (
        ("graphgpo", graphgpo(graph, weight, scale, omega=omega), lambda g: slow_graphgpo(g, scale, weight, omega)),
        (
            "rewardflow",
            rewardflow(graph, weight, scale, decay=omega),
            lambda g: slow_rewardflow(g, scale, weight, omega),
        ),
        ("hgpo", hgpo(graph, scale, 0.0, history, alpha), lambda g: slow_hgpo(g, scale, gamma, history, alpha)),
        (
            "crbc",
            crbc(graph, weight, scale, gamma=gamma, least_std=least),
            lambda g: slow_crbc(g, scale, weight, gamma, least),
        ),
    ):
        expected = [x for group in groups for x in slow(group)]
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6, err_msg=name)


# --- by hand --------------------------------------------------------------------------------------------------------


def test_distance_by_hand():
    """a -> b -> c -> success; b -> b; a -> d -> failure: d and the failure are one further than a, the furthest."""
    graph = graph_of([episode("abc", 10.0), episode("bb", 0.0), episode("ad", 0.0)])
    assert success_distance(graph).tolist() == [3, 2, 1, 4, 0, 4, 4]
    none = graph_of([episode("ab", 0.0), episode("a", -1.0)])
    assert success_distance(none).tolist() == [1, 1, 1, 1]


def test_trajectories_join_where_they_meet():
    """The failed one was as close as the other, and the way of the successful one round a loop is not counted."""
    graph = graph_of([episode("abcbd", 10.0), episode("ab", 0.0)])
    assert success_distance(graph).tolist() == [3, 2, 3, 1, 0, 4]


def test_graphgpo_by_hand():
    """Distances of k, success, failure 1, 0, 3: 8 / 2, 8, 8 / 8 at omega 1/2."""
    graph = graph_of(HAND)
    np.testing.assert_array_equal(graphgpo(graph, scale_by_std=False, omega=0.5), [4 + 1.5, 4, -4 - 1.5])
    expected = np.array([4, 4, -4]) / (np.sqrt(32) + 1e-6) + np.array([1.5, 0, -1.5]) / (np.sqrt(4.5) + 1e-6)
    np.testing.assert_allclose(graphgpo(graph, omega=0.5), expected, rtol=1e-12)
    np.testing.assert_allclose(graphgpo(graph, 2.0, False), [4 + 0.792, 4, -4 - 0.792], rtol=1e-12)  # 0.8, 0.008


def test_rewardflow_by_hand():
    """k is worth 4 at decay 1/2, h 2: the two ways out of h lead to 4 and 0."""
    graph = graph_of(HAND)
    assert propagated_rewards(graph, 0.5).tolist() == [2, 4, 8, 0]
    np.testing.assert_array_equal(rewardflow(graph, scale_by_std=False, decay=0.5), [4 + 2, 4, -4 - 2])


def test_rewardflow_takes_the_largest_discounted_reward():
    """From a the near reward of 4 is worth 2, the far one of 10 is worth 1.25 at decay 1/2, and 5.12 at 0.8."""
    graph = graph_of([episode("a", 4.0), episode("abc", 10.0)])
    assert propagated_rewards(graph, 0.5).tolist() == [2, 2.5, 5, 4, 10]
    np.testing.assert_allclose(propagated_rewards(graph, 0.8)[0], 5.12)


def test_rewardflow_tells_a_penalty_from_nothing():
    """Out of a, one step ends in a reward of -2 and one goes on to b, from where nothing is reached."""
    graph = graph_of([episode("a", -2.0), episode("ab", 0.0)])
    assert propagated_rewards(graph, 0.5).tolist() == [0, 0, -2, 0]
    np.testing.assert_array_equal(rewardflow(graph, scale_by_std=False), [-1 - 1, 1 + 1, 1])


def test_hgpo_by_hand():
    """Returns at gamma 1/2: x 4, 0; y 1/2; a 8, 0, 1. Twice the weight where a was reached from x."""
    graph = graph_of([episode("xa", 8.0), episode("xa", 0.0), episode("ya", 1.0)])
    np.testing.assert_allclose(
        hgpo(graph, scale_by_std=False), [2, (5 + 2 * 4) / 3, -2, (-3 - 2 * 4) / 3, 0, -2], rtol=1e-12
    )
    np.testing.assert_allclose(hgpo(graph, False, history_length=0), [2, 5, -2, -3, 0, -2], rtol=1e-12)
    np.testing.assert_allclose(hgpo(graph, False, depth_exponent=0.0), [2, 4.5, -2, -3.5, 0, -2], rtol=1e-12)
    spread = math.sqrt((25 + 9 + 4) / 3) + 1e-6  # n, not n - 1
    first = (5 / spread + 2 * 4 / (4 + 1e-6)) / 3
    np.testing.assert_allclose(hgpo(graph)[1], first, rtol=1e-12)


def test_hgpo_leaves_out_a_comparison_of_equals():
    """All that reached a from x won alike: the comparison within a alone has all the weight."""
    graph = graph_of([episode("xa", 8.0), episode("xa", 8.0), episode("ya", 0.0), episode("za", 8.0)])
    np.testing.assert_allclose(hgpo(graph, scale_by_std=False)[1::2], [2, 2, -6, 2], rtol=1e-12)


def test_a_step_at_the_mean_keeps_its_comparison():
    """The middle one of a is at 0, and in xa ahead of another: a third of 0 and two thirds of 2."""
    graph = graph_of([episode("ya", 8.0), episode("xa", 4.0), episode("xa", 0.0)])
    np.testing.assert_allclose(hgpo(graph, scale_by_std=False)[3], (0 + 2 * 2) / 3, rtol=1e-12)


def test_history_does_not_reach_into_the_trajectory_before():
    """b follows a in the first; in the second it is the first step, with no history that could be the same."""
    graph = graph_of([episode("ab", 8.0), episode("b", 0.0), episode("b", 2.0)], gamma=1.0)
    np.testing.assert_allclose(hgpo(graph, scale_by_std=False), [0, 14 / 3, -10 / 3, -4 / 3], rtol=1e-12)


def test_crbc_by_hand():
    """V(b) = (8 + 0) / 4 = 2, V(c) = 0: what the second episode saw of b lowers the worth of the first's step to b."""
    graph = graph_of([episode("ab", 8.0), episode("b", 0.0), episode("ac", 0.0)])
    assert node_advantage(graph, scale_by_std=False)[0] == 1.0  # V(b) = 2 here too: nothing else leads from b
    won, lost = 16 / 3, -8 / 3
    unscaled = [won + 5, won + 20, lost - 20, lost - 5, lost]
    np.testing.assert_allclose(crbc(graph, scale_by_std=False, gamma=0.5), unscaled, rtol=1e-12)
    step = crbc(graph, 1.0, gamma=0.5) - grpo(graph)
    np.testing.assert_allclose(step, [1, 1, -1, -1, 0], rtol=1e-5)  # deviations 1 and 4 of the set itself
    floored = crbc(graph, 1.0, gamma=0.5, least_std=0.25) - grpo(graph)
    np.testing.assert_allclose(floored, [0.5, 1, -1, -0.5, 0], rtol=1e-5)  # 2 at least


def test_crbc_values_are_the_fixed_point_not_the_mean_return():
    """One way to c, visited thrice, won at last once: b's single visit lost, but c is worth 8/6 at gamma 1/2."""
    graph = graph_of([episode("bc", 0.0), episode("c", 0.0), episode("c", 8.0), episode("ab", 0.0), episode("a", 1.0)])
    step = crbc(graph, 1.0, scale_by_std=False, gamma=0.5) - grpo(graph, scale_by_std=False)
    # Out of a: to b, V(b) = 1/2 mean(V(c), 0) = 1/3; to the end, 1. By mean returns b would be worth 0.
    np.testing.assert_allclose(step[[4, 6]], [-1 / 3, 1 / 3], rtol=1e-12)
    assert graph.values[0] == 0.0


def test_one_successor_is_no_comparison():
    graph = graph_of([episode("ab", 8.0), episode("ab", 8.0), episode("ab", 8.0)])
    for estimator in (graphgpo, hgpo, crbc):
        np.testing.assert_array_equal(estimator(graph), np.zeros(6))


def test_own_discount():
    """The graph's is not CRBC's, and GraphGPO has none."""
    groups = random_groups(np.random.default_rng(5))
    near, far = graph_of(*groups, gamma=0.5), graph_of(*groups, gamma=0.9)
    np.testing.assert_array_equal(crbc(near), crbc(far))
    np.testing.assert_array_equal(graphgpo(near), graphgpo(far))
    assert not np.allclose(hgpo(near), hgpo(far))


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e6, -0.7])
def test_values_equal_to_rounding_are_no_spread(reward):
    """Without a discount all is worth the same; the solution's rounding must not be divided by its own deviation."""
    rewards = [reward, np.nextafter(reward, 2 * reward)]
    graph = graph_of([episode("abcab"[: 1 + i % 5], rewards[i % 2]) for i in range(7)])
    np.testing.assert_array_equal(crbc(graph, gamma=1.0, least_std=0.0), np.zeros(graph.num_steps))


# --- what they share with the others --------------------------------------------------------------------------------


def test_step_weight_zero_is_grpo_and_no_history_is_gigpo():
    graph = graph_of(*random_groups(np.random.default_rng(0)))
    for estimator in (g2po, gigpo, graphgpo):
        np.testing.assert_array_equal(estimator(graph, step_weight=0.0), grpo(graph))
    np.testing.assert_array_equal(crbc(graph, value_weight=0.0), grpo(graph))
    step = gigpo(graph, scale_by_std=False) - episode_advantage(graph, scale_by_std=False)
    np.testing.assert_allclose(hgpo(graph, False, history_length=0), step, atol=1e-12)


def test_penalty_of_an_invalid_step_by_hand():
    graph = graph_of([episode("hk", 8.0, invalid={0}), episode("h", 0.0)])
    # With step statistics A_EP is 2, 3, -5 (see test_advantages), and the first step's part is 1 less before.
    np.testing.assert_array_equal(graphgpo(graph, 1.0, False, 1.0, omega=0.5), [4 + 1.5 - 1, 4, -5.5])
    np.testing.assert_array_equal(graphgpo(graph, 1.0, False, 1.0, "step", 0.5), [2 + 1, 3, -5 - 1])
    np.testing.assert_array_equal(crbc(graph, 1.0, False, 1.0, gamma=0.5), [4 + 2 - 1, 4, -6])
    np.testing.assert_array_equal(crbc(graph, 1.0, False, 1.0, "step", gamma=0.5), [2 + 1.5, 3, -5 - 1.5])
    np.testing.assert_array_equal(hgpo(graph, False, 1.0), [2 - 1, 0, -2])
