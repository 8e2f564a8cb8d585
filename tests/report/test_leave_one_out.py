"""How well values predict: each episode left out for real, numbers by hand, and the λ that they recommend."""

import random

import numpy as np
import pytest
from letter_graphs import episode, random_walks

from g2po_trl import StateGraph, Step, Trajectory
from g2po_trl.report.key_quality import LAMBDAS, best_lambda, hidden_share, left_out_errors, same_action_spread


@pytest.mark.parametrize("seed", range(10))
def test_each_episode_is_left_out_and_the_values_are_made_from_the_others(seed):
    groups = random_walks(seed)
    expected = []
    for group in groups:
        for left_out in (t for t in group if t.outcome != "error"):
            others = [t for t in group if t is not left_out]
            if all(t.outcome == "error" for t in others):
                continue
            tables = []
            for value_lambda in LAMBDAS:
                graph = StateGraph.from_groups([others], 0.95, value_lambda)
                keys = [step.key for t in others for step in t.steps]
                tables.append({k: v for k, v, used in zip(keys, graph.values, graph.counted) if used})
            visits = [step.key for t in others if t.outcome != "error" for step in t.steps]
            for j, step in enumerate(left_out.steps):
                if step.key in tables[0]:
                    actual = 0.95 ** (len(left_out.steps) - j) * left_out.reward
                    expected.append((visits.count(step.key), *((table[step.key] - actual) ** 2 for table in tables)))
    errors = left_out_errors(StateGraph.from_groups(groups))
    found = np.column_stack([errors.visits, errors.errors])
    assert len(found) == len(expected)
    if expected:
        order = np.lexsort(np.round(found, 6).T)
        wanted = np.array(expected)
        np.testing.assert_allclose(found[order], wanted[np.lexsort(np.round(wanted, 6).T)], atol=1e-8)
    assert errors.num_steps == sum(len(t.steps) for group in groups for t in group if t.outcome != "error")


def spread_of(groups, gamma=0.95) -> np.ndarray:
    return same_action_spread(StateGraph.from_groups(groups, gamma, with_actions=True), groups)


def recommended(groups) -> float:
    return best_lambda(left_out_errors(StateGraph.from_groups(groups)).by_group(), spread_of(groups))


def with_actions(keys: str, actions: str, reward: float, outcome: str = "failure") -> Trajectory:
    return Trajectory("t", [Step(key, action) for key, action in zip(keys, actions)], reward, outcome)


def test_the_same_action_from_the_same_state_by_hand():
    """From x, l leads to b (won) twice, r to c (lost) once and to b once; gamma 1."""
    group = [
        with_actions("xb", "lz", 8.0),
        with_actions("xb", "lz", 8.0),
        with_actions("xb", "rz", 8.0),
        with_actions("xc", "rz", 0.0),
        with_actions("xc", "lz", 0.0, "error"),
    ]
    # Next values of x: 8, 8, 8 by l, l, r and 0 by r. Of the last steps: 8, 8, 8 from b; 0 from c.
    np.testing.assert_allclose(spread_of([group], 1.0), [[32, 48]])
    assert hidden_share(spread_of([group], 1.0)) == pytest.approx(32 / 48)
    two = spread_of([group, [episode("aa", 1.0, "u")]], 1.0)
    assert two.shape == (2, 2) and hidden_share(two[1:]) is None


def test_the_end_by_a_turn_limit_says_nothing_about_keys():
    """From x, l leads to b, but once the turns are over: its worth 0 is no other end of the same action."""
    group = [with_actions("xb", "lz", 8.0) for _ in range(2)]
    group += [with_actions("xc", "rz", 0.0), with_actions("x", "l", 0.0)]
    np.testing.assert_allclose(spread_of([group], 1.0), [[128 / 3, 64]])
    group[-1].outcome = "truncated"
    np.testing.assert_allclose(spread_of([group], 1.0), [[0, 128 / 3]])


@pytest.mark.parametrize("free_text", [False, True])
def test_actions_that_are_never_the_same_are_no_reason_to_trust_keys(free_text):
    """What decides is seen at first alone, and the key of the second state hides it."""
    rng = random.Random(0)

    def played() -> Trajectory:
        lucky = rng.random() < 0.5
        keys = ["start", "middle", "won" if lucky else "lost"]
        actions = [f"{key} {rng.random() if free_text else ''}" for key in ("to it", "wait", "go")]
        return Trajectory("t", [Step(k, a) for k, a in zip(keys, actions)], 10.0 * lucky, "failure")

    assert recommended([[played() for _ in range(8)] for _ in range(16)]) == 1.0


def test_right_keys_gain_and_wrong_ones_are_found():
    """Right: one of four rooms, a hall, and half of the episodes win there. Wrong: who wins is told at first alone."""
    rng = random.Random(0)

    def right() -> Trajectory:
        won = rng.random() < 0.5
        steps = [Step(f"room {rng.randrange(4)}", "to the hall"), Step("hall", "win" if won else "lose")]
        return Trajectory("t", steps, 10.0 * won, "failure")

    def wrong() -> Trajectory:
        lucky = rng.random() < 0.5
        rooms = ["luck" if lucky else "none", *(f"room {rng.randrange(2)} of floor {floor}" for floor in range(5))]
        return Trajectory("t", [Step(room, "go") for room in rooms], 10.0 * lucky, "failure")

    def played(episode):
        return [[episode() for _ in range(24)] for _ in range(20)]

    of_right, of_wrong = (left_out_errors(StateGraph.from_groups(played(one))).errors for one in (right, wrong))
    assert of_right[:, -1].mean() < 0.98 * of_right[:, 0].mean()
    assert of_wrong[:, -1].mean() > 1.02 * of_wrong[:, 0].mean()
    assert recommended(played(wrong)) == 1.0 and recommended(played(right)) < 1.0
