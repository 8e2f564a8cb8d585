"""GraphHCA: exact numbers by hand, and what does not matter to it."""

from math import log

import numpy as np
from letter_graphs import episode, graph_of

from g2po_trl import graphhca, grpo
from g2po_trl.credit.estimators.common import EPSILON

# Phi at gamma 1/2: k (1 + 0) / 4 = 1/4, c 0, h (1/4 + 0 + 1/4) / 6 = 1/12.
GROUP = [episode("hk", 8.0), episode("hc", 0.0), episode("hk", 0.0)]
WON, LOST = 16 / 3, -8 / 3  # A_EP unscaled


def test_by_hand():
    """From h: log 3 to k and log (0.01 x 12) to c, which are log 25 apart. From k: log 4 and log 0.04."""
    graph = graph_of(GROUP)
    third, half = log(25) / 3, log(100) / 2
    expected = [WON + third, WON + half, LOST - 2 * third, LOST, LOST + third, LOST - half]
    np.testing.assert_allclose(graphhca(graph, scale_by_std=False, gamma=0.5), expected, rtol=1e-12)
    # Scaled: deviations log 25 / sqrt 3 (two of three alike) and log 100 / sqrt 2 of their sets.
    of_h, of_k = third / (log(25) / 3**0.5 + EPSILON), half / (log(100) / 2**0.5 + EPSILON)
    step = graphhca(graph, 2.0, gamma=0.5) - grpo(graph)
    np.testing.assert_allclose(step, 2 * np.array([of_h, of_k, -2 * of_h, 0, of_h, -of_k]), rtol=1e-12)


def test_the_floor_bounds_how_bad_a_state_can_be():
    """From h to c: log 0.2 in place of log 0.01; k is above the floor."""
    third, half = log(0.25 / 0.2) / 3, log(5) / 2
    step = graphhca(graph_of(GROUP), scale_by_std=False, gamma=0.5, floor=0.2) - grpo(graph_of(GROUP), False)
    np.testing.assert_allclose(step, [third, half, -2 * third, 0, third, -half], rtol=1e-12, atol=1e-12)


def test_success_counts_and_not_what_it_paid():
    groups = [[episode("hk", 2.0), episode("hc", 0.0), episode("hk", 0.0)], GROUP]
    steps = [graphhca(graph_of(group)) - grpo(graph_of(group)) for group in groups]
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-12)
    np.testing.assert_array_equal(graphhca(graph_of(GROUP), step_weight=0.0), grpo(graph_of(GROUP)))


def test_the_discount_is_its_own():
    near, far = graph_of(GROUP, gamma=0.5), graph_of(GROUP, gamma=0.9)
    np.testing.assert_array_equal(graphhca(near), graphhca(far))
