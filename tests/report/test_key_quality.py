"""The test of a run's keys, whose values predict episodes that are left out: by hand, its λ, an empty run."""

import json

import numpy as np
import pytest
from letter_graphs import episode, random_walks

from g2po_trl import StateGraph, Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.report import main
from g2po_trl.report import key_quality as keys
from g2po_trl.report.key_quality import LAMBDAS, LeftOutErrors, left_out_errors
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
    interval = keys.intervals(np.array([[1.0, 1.0], [1.0, 3.0]]))[1]  # ratio 2; distances -1 and 1, of a sum of 2
    np.testing.assert_allclose(interval, 1 + np.array([-1.96, 1.96]) * 2**0.5 / 2)


@pytest.mark.parametrize(
    ("columns", "hidden", "visits", "value_lambda", "finding"),
    [
        ({0.8: [9, 3, 0] * 3, 0.0: [10, 10, 9] * 3}, 0.0, 1, 0.8, "look right"),
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


@pytest.mark.filterwarnings("error")
def test_a_run_with_nothing_to_compare_gets_a_report_of_json(tmp_path, capsys):
    """Not of nan, which JSON does not have."""
    played = [episode("ab", 8.0, "t", one) for one in ("error", "lost")]
    write_jsonl(tmp_path / "trajectories" / "train-000001-rank0.jsonl", played)
    main([str(tmp_path), "--details"])
    assert "No episode with a result took a step." in (printed := capsys.readouterr().out) and "nan" not in printed
    json.loads((tmp_path / "report" / "analysis.json").read_text(), parse_constant=pytest.fail)


def sorted_rows(rows):
    return sorted(rows, key=lambda row: [round(value, 6) for value in row])


@pytest.mark.parametrize("seed", range(6))
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
    found = np.column_stack([errors.visits, errors.errors]).tolist()
    np.testing.assert_allclose(sorted_rows(found), sorted_rows(expected), atol=1e-8)
    assert errors.num_steps == sum(len(t.steps) for group in groups for t in group if t.outcome != "error")


def spread_of(groups, gamma=0.95) -> np.ndarray:
    return keys.same_action_spread(StateGraph.from_groups(groups, gamma, with_actions=True), groups)


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
    free_text = [with_actions("xb", "lz", 8.0), with_actions("xc", "ry", 0.0)]
    assert not spread_of([free_text]).any(), "no action was taken again"


def test_the_end_by_a_turn_limit_says_nothing_about_keys():
    """From x, l leads to b, but once the turns are over: its worth 0 is no other end of the same action."""
    group = [with_actions("xb", "lz", 8.0) for _ in range(2)]
    group += [with_actions("xc", "rz", 0.0), with_actions("x", "l", 0.0)]
    np.testing.assert_allclose(spread_of([group], 1.0), [[128 / 3, 64]])
    group[-1].outcome = "truncated"
    np.testing.assert_allclose(spread_of([group], 1.0), [[0, 128 / 3]])
