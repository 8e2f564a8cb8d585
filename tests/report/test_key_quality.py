"""The test of a run's keys, whose values predict episodes that are left out: by hand, its λ, words, empty runs."""

import json
import random

import numpy as np
import pytest
from letter_graphs import episode, random_walks

from g2po_trl import StateGraph, Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.report import main
from g2po_trl.report import key_quality as keys
from g2po_trl.report.key_quality import LAMBDAS, LeftOutErrors, best_lambda, left_out_errors
from g2po_trl.runs.iterations import Iteration


def examined(*iterations, gamma=0.5):
    runs = [Iteration(number, groups) for number, groups in enumerate(iterations, 1)]
    graphs = [StateGraph.from_groups(groups, gamma, with_actions=True) for groups in iterations]
    return keys.examine(*keys.measure(runs, graphs))


def test_the_table_by_hand():
    """x leads to h, and so does y. Left out, x is predicted by the other x alone (λ = 1) or by h (λ = 0)."""
    group = [episode("xh", 8.0), episode("xh", 0.0), episode("yh", 8.0), episode("z", 0.0)]
    found = examined([group])
    # λ = 1. x: 2 by 0 and 0 by 2. h of x: 4 by (0 + 4) / 2, 0 by 4; h of y: 4 by 2. y and z: no other visit.
    # λ = 0. x of the first: h = (0 + 4) / 2, half of it is 1; x of the second: h = 4, half of it is 2.
    whole = found["all"]
    assert found["steps"] == 7 and whole["steps"] == 5 and found["unpredicted_share"] == pytest.approx(2 / 7)
    assert whole["mean_squared_error"][0] == pytest.approx((4 + 4 + 4 + 16 + 4) / 5)
    assert whole["mean_squared_error"][-1] == pytest.approx((1 + 4 + 4 + 16 + 4) / 5)
    assert whole["relative"][0] == 0 and whole["relative"][-1] == pytest.approx(29 / 32 - 1)
    assert found["often"]["steps"] == 0
    assert whole["groups"] == 1 and whole["interval"] is None, "one group has no interval"
    assert examined([group], gamma=1.0)["all"]["mean_squared_error"][0] == pytest.approx((64 * 2 + 16 * 2 + 64) / 5)


def test_intervals_are_paired_and_as_wide_as_the_spread_of_groups():
    rng = np.random.default_rng(0)
    size = rng.gamma(2.0, 5.0, 400)  # much the same for both λ: what is compared must not feel it
    errors = np.stack([size, 0.9 * size + rng.normal(0, 0.5, 400)], axis=1)
    found = keys.intervals(errors)
    ratio = errors[:, 1].sum() / errors[:, 0].sum()
    deviation = (errors[:, 1] - ratio * errors[:, 0]).std() / errors[:, 0].mean() / 20
    np.testing.assert_allclose(found[1], ratio - 1 + np.array([-1.96, 1.96]) * deviation, atol=1e-3 * deviation)
    assert found[0].tolist() == [0, 0] and found[1, 1] < 0


def test_actions_tell_that_keys_hide_something():
    """x, go leads to a room that wins and to one that loses; left-out errors would not say so."""
    same = examined([[episode("xab", 8.0), episode("xcd", 0.0)]])  # the same action
    assert same["hidden_share"] == 1.0
    other = [episode("xab", 8.0), episode("xcd", 0.0)]
    other[1].steps[0].action = "stay"
    assert examined([other * 2])["hidden_share"] == 0.0
    assert examined([other])["hidden_share"] is None, "no action was taken again"
    assert examined([[episode("xab", 8.0)] * 2])["hidden_share"] is None, "next values do not differ"


@pytest.mark.parametrize(
    ("columns", "hidden", "visits", "value_lambda", "finding"),
    [
        ({0.8: [9, 3, 0] * 3, 0.0: [10, 10, 9] * 3}, 0.0, 1, 0.8, "look right"),
        ({0.5: [8] * 9, 0.0: [9] * 9}, 0.0, 8, 0.5, "look right"),
        ({0.5: [8] * 9, 0.0: [7] * 9}, 0.0, 1, 0.0, "look right"),
        ({0.5: [8] * 9}, 0.3, 1, 1, "environment is random"),
        ({0.8: [9] * 9, 0.0: [11] * 9}, 0.0, 2, 0.8, "how they were reached"),
        ({0.9: [11] * 9, 0.8: [11] * 9, 0.5: [12] * 9, 0.0: [14, 9, 12, 9, 11, 10, 10, 10, 10]}, 0, 1, 1, "right"),
    ],
)
def test_findings_and_advice(columns, hidden, visits, value_lambda, finding):
    """One prediction a group, of errors at each λ; others are as at 1. `hidden`: the share of the same action."""
    table = np.column_stack([columns.get(one, [10] * 9) for one in LAMBDAS]).astype(float)
    errors = LeftOutErrors(table, np.full(9, visits), np.arange(9), 9)
    found = keys.examine(errors, np.tile([hidden, 1.0], (9, 1)))
    told, advice = keys.in_short(found)
    assert found["value_lambda"] == value_lambda and finding in told
    assert ("--value-lambda" in advice) == (value_lambda < 1 and "right" in finding)


def write(run, groups, iterations=1):
    played = [trajectory for group in groups for trajectory in group]
    for number in range(1, iterations + 1):
        for rank in (0, 1):
            write_jsonl(run / "trajectories" / f"train-{number:06d}-rank{rank}.jsonl", played[rank::2])


@pytest.mark.parametrize(
    "groups, said",
    [
        ([[episode("abab", 8.0, f"t{n}")] for n in range(3)], "No state was visited by two episodes of a group"),
        ([[episode("aba", 0.0, f"t{n}")] * 4 for n in range(3)], "Too little data to test"),
        ([[episode("ab", 8.0, "t", one) for one in ("error", "lost")]], "No episode with a result took a step."),
    ],
)
@pytest.mark.filterwarnings("error")
def test_runs_with_little_to_compare_get_a_report_that_says_so(tmp_path, capsys, groups, said):
    write(tmp_path, groups)
    main([str(tmp_path), "--details"])
    assert said in (printed := capsys.readouterr().out) and "nan" not in printed
    json.loads((tmp_path / "report" / "analysis.json").read_text(), parse_constant=pytest.fail)


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
                seen = [step.key for t in others for step in t.steps]
                tables.append({k: v for k, v, used in zip(seen, graph.values, graph.counted) if used})
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
    return keys.same_action_spread(StateGraph.from_groups(groups, gamma, with_actions=True), groups)


def recommended(groups) -> float:
    return best_lambda(left_out_errors(StateGraph.from_groups(groups)).by_group(), spread_of(groups))


def with_actions(states, actions, reward: float, outcome: str = "failure") -> Trajectory:
    return Trajectory("t", [Step(key, action) for key, action in zip(states, actions)], reward, outcome)


def test_the_same_action_from_the_same_state_by_hand():
    """From x, l leads to b (won) twice, r to c (lost) once and to b once; gamma 1."""
    group = [with_actions("xb", actions, 8.0) for actions in ("lz", "lz", "rz")]
    group += [with_actions("xc", "rz", 0.0), with_actions("xc", "lz", 0.0, "error")]
    # Next values of x: 8, 8, 8 by l, l, r and 0 by r. Of the last steps: 8, 8, 8 from b; 0 from c.
    np.testing.assert_allclose(spread_of([group], 1.0), [[32, 48]])
    assert keys.hidden_share(spread_of([group], 1.0)) == pytest.approx(32 / 48)
    two = spread_of([group, [episode("aa", 1.0, "u")]], 1.0)
    assert two.shape == (2, 2) and keys.hidden_share(two[1:]) is None


def test_the_end_by_a_turn_limit_says_nothing_about_keys():
    """From x, l leads to b, but once the turns are over: its worth 0 is no other end of the same action."""
    group = [with_actions("xb", "lz", 8.0) for _ in range(2)]
    group += [with_actions("xc", "rz", 0.0), with_actions("x", "l", 0.0)]
    np.testing.assert_allclose(spread_of([group], 1.0), [[128 / 3, 64]])
    group[-1].outcome = "truncated"
    np.testing.assert_allclose(spread_of([group], 1.0), [[0, 128 / 3]])


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
