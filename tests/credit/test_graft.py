"""GRAFT: exact numbers by hand, against an implementation that knows no arrays, and what its equations imply."""

import numpy as np
import pytest
from letter_graphs import episode, graph_of, random_groups

from g2po_trl import graft
from g2po_trl.credit.estimators.common import EPSILON

# gamma 1/2: V(k) = (8 + 0) / 4 = 2, V(c) = 0, V(h) = (2 + 0 + 2) / 6 = 2/3, V(s) = 1/3. d from h: 1/3, -2/3, 1/3.
GROUP = [episode("shk", 8.0), episode("hc", 0.0), episode("hk", 0.0)]


def slow_graft(group, scale, gamma, gae_lambda):
    """Equations 5 and 8 to 11: values by iteration, hops by sets of edges."""
    played = [t for t in group if t.outcome != "error"]
    moves = [
        [
            (step.key, t.steps[j + 1].key if j + 1 < len(t.steps) else ("end", t.reward))
            for j, step in enumerate(t.steps)
        ]
        for t in played
    ]
    values = {end: end[1] for steps in moves for _, end in steps if isinstance(end, tuple)}
    values |= {state: 0.0 for steps in moves for state, _ in steps}
    for _ in range(3000):
        for state in [one for one in values if not isinstance(one, tuple)]:
            nexts = [then for steps in moves for here, then in steps if here == state]
            values[state] = gamma * sum(values[then] for then in nexts) / len(nexts)
    edges = {edge for steps in moves for edge in steps}

    def gain(edge):
        return gamma * values[edge[1]] - values[edge[0]]

    credit = []
    for steps in moves:
        for j, edge in enumerate(steps):
            total, reached = gain(edge), {edge[1]}
            for k in range(1, len(steps) - j + 1):
                ahead = [one for one in edges if one[0] in reached]
                total += (gamma * gae_lambda) ** k * np.mean([gain(one) for one in ahead]) if ahead else 0.0
                reached = {then for _, then in ahead}
            credit.append((edge[0], total))
    for state, value in credit:
        of_state = [one for other, one in credit if other == state]
        if len(of_state) == 1:
            yield 0.0 if abs(value) < 1e-9 else value / (abs(value) + EPSILON if scale else 1)
        elif np.ptp(of_state) < 1e-9:
            yield 0.0
        else:
            yield (value - np.mean(of_state)) / (np.std(of_state, ddof=1) + EPSILON if scale else 1)


def test_by_hand():
    """s is visited once: D_1 is that of h's edges, (1/3 - 2/3) / 2, and D_2 that of k's and c's, 0."""
    graph = graph_of(GROUP)
    expected = [-1 / 24, 1 / 3, 2, -2 / 3, 0, 1 / 3, -2]
    np.testing.assert_allclose(graft(graph, False, gamma=0.5, gae_lambda=0.5), expected, rtol=1e-12, atol=1e-15)
    root = np.sqrt([2, 3])
    scaled = [-1 / (1 + 24 * EPSILON), 1 / root[1], 1 / root[0], -2 / root[1], 0, 1 / root[1], -1 / root[0]]
    np.testing.assert_allclose(graft(graph, gamma=0.5, gae_lambda=0.5), scaled, rtol=1e-5)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_a_slow_implementation(seed, scale):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, num_groups=2, group_size=4)
    groups[0].insert(1, episode("aabz", 99.0, groups[0][0].task_id, "error"))
    gamma, gae_lambda = rng.uniform(0.5, 0.95), rng.uniform(0, 1)
    expected = []
    for group in groups:
        of_played = iter(slow_graft(group, scale, gamma, gae_lambda))
        expected += [0.0 if t.outcome == "error" else next(of_played) for t in group for _ in t.steps]
    np.testing.assert_allclose(graft(graph_of(*groups), scale, 0.0, gamma, gae_lambda), expected, atol=1e-6)


def test_without_hops_a_single_step_says_nothing():
    """Its state is worth exactly what the fixed point makes of the next one."""
    assert graft(graph_of(GROUP), gae_lambda=0.0)[0] == 0 != graft(graph_of(GROUP))[0]


def test_the_penalty_and_the_discount():
    invalid = [episode("shk", 8.0, invalid={1}), *GROUP[1:]]
    difference = graft(graph_of(invalid), invalid_action_penalty=0.1) - graft(graph_of(GROUP))
    np.testing.assert_allclose(difference, [0, -0.1, 0, 0, 0, 0, 0], atol=1e-15)
    np.testing.assert_array_equal(graft(graph_of(GROUP, gamma=0.5)), graft(graph_of(GROUP, gamma=0.9)))
