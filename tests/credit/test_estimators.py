"""GraphGPO, RewardFlow, HGPO, CRBC, GRAFT and GraphHCA: exact numbers by hand, and against slow implementations."""

import math
from collections import defaultdict

import numpy as np
import pytest
from letter_graphs import HAND, episode, graph_of, random_groups, solved_values

from g2po_trl import Trajectory, crbc, episode_advantage, g2po, gigpo, graft, graphgpo, graphhca, grpo, hgpo
from g2po_trl.credit.estimators.common import EPSILON
from g2po_trl.credit.estimators.graphgpo import success_distance
from g2po_trl.credit.estimators.rewardflow import propagated_rewards, rewardflow


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
    keys = [[step.key for step in trajectory.steps] for trajectory in group]
    return [list(zip(of, [*of[1:], ("end", number)])) for number, of in enumerate(keys)]


def edges_of(group: list[Trajectory]) -> list[tuple]:
    return [edge for t, steps in zip(group, transitions(group)) if whole(t) for edge in steps]


def with_episode(group, worth: dict, scale: bool, weight: float, ddof: int = 1, least=0.0) -> list[float]:
    """A_EP, and so many times worth[next node] of each step among all steps out of its node."""
    rewards, sets, found = [t.reward for t in group if whole(t)], defaultdict(list), []
    for node, after in edges_of(group):
        sets[node].append(worth[after])
    for t, steps in zip(group, transitions(group)):
        a_ep = standardised(t.reward, rewards, scale, 1) if whole(t) else 0.0
        for node, after in steps:
            step = standardised(worth[after], sets[node], scale, ddof, least) if whole(t) else 0.0
            found.append(a_ep + weight * step)
    return found


def fixed_point(group: list[Trajectory], gamma: float) -> dict:
    """V of each state, and the reward of each end."""
    found = {key: value for (_, key), value in solved_values([group], gamma, 0.0).items()}
    return found | {("end", number): t.reward for number, t in enumerate(group)}


def slow_graphgpo(group, scale, weight, omega) -> list[float]:
    """Distances by Bellman-Ford over the set of edges."""
    edges = set(edges_of(group))
    distance = {end: math.inf for edge in edges for end in edge}
    for number, t in enumerate(group):
        if whole(t) and t.reward > 0 and t.steps:
            distance["end", number] = 0
    for _ in distance:
        for node, after in edges:
            distance[node] = min(distance[node], distance[after] + 1)
    furthest = max((d for d in distance.values() if d < math.inf), default=0)
    best = max([0.0, *(t.reward for t in group if whole(t))])
    worth = {node: best * omega ** min(d, furthest + 1) for node, d in distance.items()}
    return with_episode(group, worth, scale, weight)


def slow_rewardflow(group, scale, weight, decay) -> list[float]:
    """V by breadth-first search from each end of a trajectory, backwards over the set of edges."""
    edges = set(edges_of(group))
    worth = {end: 0.0 for edge in edges for end in edge}
    for number, t in enumerate(group):
        if not (whole(t) and t.steps):
            continue
        worth["end", number] = t.reward
        reached, level = {("end", number)}, 0
        seen = set(reached)
        while reached:
            for node in reached:
                worth[node] = max(worth[node], decay**level * t.reward)
            reached = {node for node, after in edges if after in reached} - seen
            seen, level = seen | reached, level + 1
    return with_episode(group, worth, scale, weight)


def slow_hgpo(group, scale, gamma, history, alpha) -> list[float]:
    def contexts(trajectory, j):
        keys = [step.key for step in trajectory.steps]
        return [tuple(keys[j - k : j + 1]) for k in range(history + 1) if j >= k]

    sets, advantages = defaultdict(list), []
    for t in filter(whole, group):
        for j in range(len(t.steps)):
            for context in contexts(t, j):
                sets[context].append(gamma ** (len(t.steps) - 1 - j) * t.reward)
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
    largest = max([0.0, *(abs(t.reward) for t in group if whole(t))])
    return with_episode(group, fixed_point(group, gamma), scale, weight, 0, least * largest)


def slow_graft(group, scale, gamma, gae_lambda) -> list[float]:
    """Equations 5 and 8 to 11, hops by sets of edges; ends that pay the same are one node."""
    values = fixed_point(group, gamma)
    values |= {("end", t.reward): t.reward for t in group}
    moves = [
        [(a, ("end", t.reward) if isinstance(b, tuple) else b) for a, b in steps]
        for t, steps in zip(group, transitions(group))
    ]
    edges = {edge for t, steps in zip(group, moves) if whole(t) for edge in steps}

    def gain(edge):
        return gamma * values[edge[1]] - values[edge[0]]

    def credit(edge, hops):
        total, reached = gain(edge), {edge[1]}
        for k in range(1, hops):
            ahead = [one for one in edges if one[0] in reached]
            total += (gamma * gae_lambda) ** k * np.mean([gain(one) for one in ahead]) if ahead else 0.0
            reached = {then for _, then in ahead}
        return total

    credits, sets, found = [], defaultdict(list), []
    for t, steps in zip(group, moves):
        for j, edge in enumerate(steps):
            credits.append((edge[0], credit(edge, len(steps) - j + 1) if whole(t) else None))
    for state, value in credits:
        sets[state] += [] if value is None else [value]
    for state, value in credits:
        if value is None or abs(value) < 1e-9 and len(sets[state]) == 1:
            found.append(0.0)
        elif len(sets[state]) == 1:
            found.append(value / (abs(value) + EPSILON if scale else 1))
        else:
            found.append(standardised(value, sets[state], scale, 1))
    return found


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


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_equal_to_slow_implementations(seed, scale):
    groups = groups_with_all(seed)
    rng = np.random.default_rng(seed)
    weight, omega, gamma = rng.uniform(0, 5), rng.uniform(0.05, 0.9), rng.uniform(0.2, 1)
    history, alpha, least = int(rng.integers(4)), rng.uniform(0, 2), rng.choice([0.0, 0.01, 0.2])
    graph = graph_of(*groups, gamma=gamma)
    for slow, options, actual in (
        (slow_graphgpo, (weight, omega), graphgpo(graph, weight, scale, omega=omega)),
        (slow_rewardflow, (weight, omega), rewardflow(graph, weight, scale, decay=omega)),
        (slow_hgpo, (gamma, history, alpha), hgpo(graph, scale, 0.0, history, alpha)),
        (slow_crbc, (weight, 0.9 * gamma, least), crbc(graph, weight, scale, gamma=0.9 * gamma, least_std=least)),
        (slow_graft, (0.95 * gamma, omega), graft(graph, scale, 0.0, 0.95 * gamma, omega)),
    ):
        expected = [x for group in groups for x in slow(group, scale, *options)]
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6, err_msg=slow.__name__)


def test_distance_by_hand():
    """a -> b -> c -> success; b -> b; a -> d -> failure: d and the failure are one further than a, the furthest."""
    graph = graph_of([episode("abc", 10.0), episode("bb", 0.0), episode("ad", 0.0)])
    assert success_distance(graph).tolist() == [3, 2, 1, 4, 0, 4, 4]
    none = graph_of([episode("ab", 0.0), episode("a", -1.0)])
    assert success_distance(none).tolist() == [1, 1, 1, 1]


def test_graphgpo_by_hand():
    """Distances of k, success, failure 1, 0, 3: 8 / 2, 8, 8 / 8 at omega 1/2."""
    graph = graph_of(HAND)
    np.testing.assert_array_equal(graphgpo(graph, scale_by_std=False, omega=0.5), [4 + 1.5, 4, -4 - 1.5])
    expected = np.array([4, 4, -4]) / (np.sqrt(32) + 1e-6) + np.array([1.5, 0, -1.5]) / (np.sqrt(4.5) + 1e-6)
    np.testing.assert_allclose(graphgpo(graph, omega=0.5), expected, rtol=1e-12)
    np.testing.assert_allclose(graphgpo(graph, 2.0, False), [4 + 0.792, 4, -4 - 0.792], rtol=1e-12)  # 0.8, 0.008


def test_rewardflow_by_hand():
    """k is worth 4 at decay 1/2, h 2: the two ways out of h lead to 4 and 0. Of two rewards the larger one counts."""
    graph = graph_of(HAND)
    assert propagated_rewards(graph, 0.5).tolist() == [2, 4, 8, 0]
    np.testing.assert_array_equal(rewardflow(graph, scale_by_std=False, decay=0.5), [4 + 2, 4, -4 - 2])
    graph = graph_of([episode("a", 4.0), episode("abc", 10.0)])
    assert propagated_rewards(graph, 0.5).tolist() == [2, 2.5, 5, 4, 10]
    np.testing.assert_allclose(propagated_rewards(graph, 0.8)[0], 5.12)


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
    # The middle one of a is at 0, and in xa ahead of another: a third of 0 and two thirds of 2.
    graph = graph_of([episode("ya", 8.0), episode("xa", 4.0), episode("xa", 0.0)])
    np.testing.assert_allclose(hgpo(graph, scale_by_std=False)[3], (0 + 2 * 2) / 3, rtol=1e-12)


def test_crbc_by_hand():
    """V(b) = (8 + 0) / 4 = 2, V(c) = 0: what the second episode saw of b lowers the worth of the first's step to b."""
    graph = graph_of([episode("ab", 8.0), episode("b", 0.0), episode("ac", 0.0)])
    won, lost = 16 / 3, -8 / 3
    unscaled = [won + 5, won + 20, lost - 20, lost - 5, lost]
    np.testing.assert_allclose(crbc(graph, scale_by_std=False, gamma=0.5), unscaled, rtol=1e-12)
    step = crbc(graph, 1.0, gamma=0.5) - grpo(graph)
    np.testing.assert_allclose(step, [1, 1, -1, -1, 0], rtol=1e-5)  # deviations 1 and 4 of the set itself
    floored = crbc(graph, 1.0, gamma=0.5, least_std=0.25) - grpo(graph)
    np.testing.assert_allclose(floored, [0.5, 1, -1, -0.5, 0], rtol=1e-5)  # 2 at least


# gamma 1/2: V(k) = (8 + 0) / 4 = 2, V(c) = 0, V(h) = (2 + 0 + 2) / 6 = 2/3, V(s) = 1/3. d from h: 1/3, -2/3, 1/3.
HOPS = [episode("shk", 8.0), episode("hc", 0.0), episode("hk", 0.0)]


def test_graft_by_hand():
    """s is visited once: D_1 is that of h's edges, (1/3 - 2/3) / 2, and D_2 that of k's and c's, 0."""
    graph = graph_of(HOPS)
    expected = [-1 / 24, 1 / 3, 2, -2 / 3, 0, 1 / 3, -2]
    np.testing.assert_allclose(graft(graph, False, gamma=0.5, gae_lambda=0.5), expected, rtol=1e-12, atol=1e-15)
    root = np.sqrt([2, 3])
    scaled = [-1 / (1 + 24 * EPSILON), 1 / root[1], 1 / root[0], -2 / root[1], 0, 1 / root[1], -1 / root[0]]
    np.testing.assert_allclose(graft(graph, gamma=0.5, gae_lambda=0.5), scaled, rtol=1e-5)
    # Without hops a state that was seen once is worth exactly what the fixed point makes of the next one.
    assert graft(graph, gae_lambda=0.0)[0] == 0 != graft(graph)[0]


# Phi at gamma 1/2: k (1 + 0) / 4 = 1/4, c 0, h (1/4 + 0 + 1/4) / 6 = 1/12.
CHANCES = [episode("hk", 8.0), episode("hc", 0.0), episode("hk", 0.0)]


def test_graphhca_by_hand():
    """From h: log 3 to k and log (0.01 x 12) to c, which are log 25 apart. From k: log 4 and log 0.04."""
    graph, won, lost = graph_of(CHANCES, gamma=0.9), 16 / 3, -8 / 3  # A_EP unscaled
    third, half = math.log(25) / 3, math.log(100) / 2
    expected = [won + third, won + half, lost - 2 * third, lost, lost + third, lost - half]
    np.testing.assert_allclose(graphhca(graph, scale_by_std=False, gamma=0.5), expected, rtol=1e-12)
    # Scaled: deviations log 25 / sqrt 3 (two of three alike) and log 100 / sqrt 2 of their sets.
    of_h, of_k = third / (math.log(25) / 3**0.5 + EPSILON), half / (math.log(100) / 2**0.5 + EPSILON)
    step = graphhca(graph, 2.0, gamma=0.5) - grpo(graph)
    np.testing.assert_allclose(step, 2 * np.array([of_h, of_k, -2 * of_h, 0, of_h, -of_k]), rtol=1e-12)
    # A floor bounds how bad a state can be. From h to c: log 0.2 in place of log 0.01; k is above the floor.
    third, half = math.log(0.25 / 0.2) / 3, math.log(5) / 2
    step = graphhca(graph, scale_by_std=False, gamma=0.5, floor=0.2) - grpo(graph, False)
    np.testing.assert_allclose(step, [third, half, -2 * third, 0, third, -half], rtol=1e-12, atol=1e-12)


def test_in_graphhca_success_counts_and_not_what_it_paid():
    groups = [[episode("hk", 2.0), *CHANCES[1:]], CHANCES]
    steps = [graphhca(graph_of(group)) - grpo(graph_of(group)) for group in groups]
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-12)


def test_step_weight_zero_is_grpo_and_no_history_is_gigpo():
    graph = graph_of(*random_groups(np.random.default_rng(0)))
    for estimator in (g2po, gigpo, graphgpo, graphhca):
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
    invalid = [episode("shk", 8.0, invalid={1}), *HOPS[1:]]
    difference = graft(graph_of(invalid), invalid_action_penalty=0.1) - graft(graph_of(HOPS))
    np.testing.assert_allclose(difference, [0, -0.1, 0, 0, 0, 0, 0], atol=1e-15)
