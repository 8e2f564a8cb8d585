"""The test of a run's keys: its table by hand, intervals checked by other ways to make them, its words, empty runs."""

import json
import random

import numpy as np
import pytest

from g2po_envs.sokoban import SokobanEnvironment, level_rows
from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.report import main
from g2po_trl.report import plots
from g2po_trl.report import state_key_test as keys
from g2po_trl.report.analysis import Iteration
from g2po_trl.report.leave_one_out import LAMBDAS, LeftOutErrors


def episode(states, reward: float, task="t", outcome=None) -> Trajectory:
    outcome = outcome or ("success" if reward else "failure")
    return Trajectory(task, [Step(state, "go") for state in states], reward, outcome)


def examined(*iterations, gamma=0.5):
    runs = [Iteration(number, groups) for number, groups in enumerate(iterations, 1)]
    return keys.examine(*keys.measure(runs, gamma), [run.number for run in runs])


def seed_row(found, visits=None, iterations=None):
    return next(row for row in found["rows"] if (row["visits"], row["iterations"]) == (visits, iterations))


def errors_of(columns: dict[float, list[float]], visits: int = 1) -> LeftOutErrors:
    """One prediction a group; what is not given is as at λ = 1."""
    table = np.column_stack([columns.get(of, columns[1.0]) for of in LAMBDAS]).astype(float)
    return LeftOutErrors(LAMBDAS, table, np.full(len(table), visits), np.arange(len(table)), len(table))


def examined_errors(errors: LeftOutErrors, hidden: float = 0.0):
    """`hidden`: the share of next values' spread that is among steps of the same action."""
    spread = np.tile([hidden, 1.0], (len(errors.errors), 1))
    return keys.examine(errors, spread, np.zeros(len(errors.errors), int), [1])


def test_the_table_by_hand():
    """x leads to h, and so does y. Left out, x is predicted by the other x alone (λ = 1) or by h (λ = 0)."""
    group = [episode("xh", 8.0), episode("xh", 0.0), episode("yh", 8.0), episode("z", 0.0)]
    found = examined([group])
    # λ = 1. x: 2 by 0 and 0 by 2. h of x: 4 by (0 + 4) / 2, 0 by 4; h of y: 4 by 2. y and z: no other visit.
    # λ = 0. x of the first: h = (0 + 4) / 2, half of it is 1; x of the second: h = 4, half of it is 2.
    whole = seed_row(found)
    assert found["steps"] == 7 and whole["steps"] == 5 and found["unpredicted_share"] == pytest.approx(2 / 7)
    assert whole["mean_squared_error"][0] == pytest.approx((4 + 4 + 4 + 16 + 4) / 5)
    assert whole["mean_squared_error"][-1] == pytest.approx((1 + 4 + 4 + 16 + 4) / 5)
    assert whole["relative"][0] == 0 and whole["relative"][-1] == pytest.approx(29 / 32 - 1)
    assert (
        seed_row(found, [1, 2])["steps"] == 5
        and seed_row(found, [3, 7])["steps"] == seed_row(found, [8, None])["steps"] == 0
    )
    assert whole["groups"] == 1 and whole["interval"] is None, "one group has no interval"
    assert seed_row(examined([group], gamma=1.0))["mean_squared_error"][0] == pytest.approx((64 * 2 + 16 * 2 + 64) / 5)


def test_rows_by_visits_and_thirds_add_up():
    def game(number):
        """`number` + 1 episodes: each visit is predicted by `number` others."""
        return [episode("a", 8.0 * (place % 2)) for place in range(number + 1)]

    found = examined(*[[game(number), game(2)] for number in (1, 3, 7, 8, 30)])
    assert [row["steps"] for row in found["rows"][:4]] == [2 + 4 + 8 + 9 + 31 + 15, 2 + 15, 4 + 8, 9 + 31]
    assert [seed_row(found, None, of)["steps"] for of in ([1, 2], [3, 4], [5, 5])] == [2 + 4 + 6, 8 + 9 + 6, 31 + 3]
    assert seed_row(found, [8, None], [3, 4])["steps"] == 9
    for of in (None, [1, 2], [3, 7], [8, None]):
        parts = [row for row in found["rows"] if row["visits"] == of and row["iterations"]]
        total = sum(row["steps"] * row["mean_squared_error"][0] for row in parts if row["steps"])
        assert total == pytest.approx(seed_row(found, of)["steps"] * seed_row(found, of)["mean_squared_error"][0])
    assert len(examined([game(1)], [game(1)])["rows"]) == 4, "two iterations have no thirds"
    assert "iterations 5 " in keys.text(found) and "3-7 visits" in keys.text(found)


def test_groups_beyond_a_batch_are_the_same(monkeypatch):
    rng = random.Random(0)
    groups = [[episode(rng.choices("abc", k=4), 8.0 * rng.randrange(2)) for _ in range(3)] for _ in range(20)]
    whole = examined(groups[:10], groups[10:])
    monkeypatch.setattr(keys, "_TOGETHER", 3)
    parts = examined(groups[:10], groups[10:])
    np.testing.assert_allclose(parts["rows"][0]["mean_squared_error"], whole["rows"][0]["mean_squared_error"])
    assert parts["rows"][0]["groups"] == whole["rows"][0]["groups"] > 10


# -- intervals --------------------------------------------------------------------------------------------------------


def test_intervals_are_paired_deterministic_and_as_wide_as_the_spread_of_groups():
    rng = np.random.default_rng(0)
    size = rng.gamma(2.0, 5.0, 400)  # much the same for both λ: what is compared must not feel it
    errors = np.stack([size, 0.9 * size + rng.normal(0, 0.5, 400)], axis=1)[:, None, :]
    found = keys.bootstrap(errors, base=0)
    np.testing.assert_array_equal(found, keys.bootstrap(errors, base=0))
    ratio = errors[:, 0, 1].sum() / errors[:, 0, 0].sum()
    deviation = (errors[:, 0, 1] - ratio * errors[:, 0, 0]).std() / errors[:, 0, 0].mean() / 20
    np.testing.assert_allclose(found[0, 1], ratio - 1 + np.array([-1.96, 1.96]) * deviation, atol=0.2 * deviation)
    assert found[0, 0].tolist() == [0, 0] and found[0, 1, 1] < 0


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    sums = rng.gamma(1.0, 1.0, (40, 300, 2))  # 300 runs of 40 groups, both λ alike
    low, high = keys.bootstrap(sums, base=0, resamples=500)[:, 1].T
    assert 0.90 < ((low < 0) & (high > 0)).mean() < 0.98


def test_a_row_without_errors_has_no_interval():
    assert np.isnan(keys.bootstrap(np.zeros((9, 1, 2)), base=0)).all()
    rows = keys.table(errors_of({1.0: [0.0] * 9}), np.zeros(9, int), [1])
    assert rows[0]["relative"] is None and rows[0]["interval"] is None and rows[0]["steps"] == 9
    seven = keys.table(errors_of({1.0: [1.0] * 7 + [0.0] * 9}), np.zeros(16, int), [1])
    assert seven[0]["groups"] == 7 and seven[0]["interval"] is None, "groups without errors make no interval"


# -- words ------------------------------------------------------------------------------------------------------------


def test_a_lambda_that_predicts_better_is_advised():
    found = examined_errors(errors_of({1.0: [10] * 9, 0.5: [8] * 9, 0.0: [9] * 9}, visits=8))
    assert found["value_lambda"] == 0.5 and found["often_standard_errors"] == pytest.approx(-3)
    assert "λ = 0.5 predicts the returns of left-out episodes best (squared error -20.0 %" in found["verdict"]
    assert "No sign that the keys hide something" in found["verdict"]
    assert found["verdict"].endswith(
        "λ = 0 predicts better than λ = 1 (-10.0 %, 95 % interval -10.0 to -10.0 %). Try --value_lambda 0.5."
    )
    least = examined_errors(errors_of({1.0: [10] * 9, 0.5: [8] * 9, 0.0: [7] * 9}))["verdict"]
    assert "λ = 0 predicts" in least and least.endswith("Try --value_lambda 0.")
    assert "could not be tested: too few groups" in least, "nothing was visited often"


def test_right_keys_of_episodes_that_run_out_of_turns_look_right():
    """Sokoban's observation is the whole state, and the policy random: most episodes end by the turn limit."""
    rng, environment, groups = random.Random(0), SokobanEnvironment(), []
    for row in level_rows("tiny", 16):
        groups.append([])
        for _ in range(8):
            seen, steps, result = environment.reset(**row), [], None
            while len(steps) < 12 and not (result and result.terminated):
                steps.append(Step(seen.text, rng.choice(seen.admissible_actions)))
                result = environment.step(steps[-1].action)
                seen = result.observation
            won = result.terminated
            groups[-1].append(Trajectory(row["task_id"], steps, 10.0 * won, "success" if won else "truncated"))
    found = examined(groups)
    assert found["hidden_share"] == pytest.approx(0, abs=1e-9) and "hide something" not in keys.in_short(found)[0]
    for step in (step for group in groups for played in group for step in played.steps):
        step.state_key = step.observation.replace("x", "_").replace("*", "o")
    assert "hide something" in keys.in_short(examined(groups))[0], "without boxes"


def test_actions_tell_that_keys_hide_something():
    """x, go leads to a room that wins and to one that loses; left-out errors would not say so."""
    found = examined_errors(errors_of({1.0: [10] * 9, 0.5: [8] * 9}), hidden=0.3)
    assert found["hidden_share"] == pytest.approx(0.3) and found["value_lambda"] == 1
    assert "or the environment is random: 30 % of how far" in found["verdict"]
    assert "Keep value_lambda 1, and see" in found["verdict"]
    assert "λ = 0.5 predicts the returns of left-out episodes best" in found["verdict"]
    same = examined([[episode("xab", 8.0), episode("xcd", 0.0)]])  # the same action
    assert same["hidden_share"] == 1.0
    other = [episode("xab", 8.0), episode("xcd", 0.0)]
    other[1].steps[0].action = "stay"
    assert examined([other * 2])["hidden_share"] == 0.0
    assert examined([other])["hidden_share"] is None, "no action was taken again"
    assert examined([[episode("xab", 8.0)] * 2])["hidden_share"] is None, "next values do not differ"


def test_keys_that_hide_something_are_named_with_what_to_do():
    found = examined_errors(errors_of({1.0: [10] * 9, 0.5: [8] * 9, 0.0: [11] * 9}, visits=8))
    assert found["value_lambda"] == 0.5 and found["often_standard_errors"] == pytest.approx(3)
    assert found["verdict"].startswith("The keys hide something that matters") and "+10.0 %" in found["verdict"]
    assert 'Keep value_lambda 1, and see docs/your_environment.md, "State keys".' in found["verdict"]


def test_keys_that_hide_something_where_visits_are_few_are_named_too():
    found = examined_errors(errors_of({1.0: [10] * 9, 0.8: [9] * 9, 0.0: [11] * 9}, visits=2))
    assert found["value_lambda"] == 0.8 and found["often_standard_errors"] is None
    assert found["lost_standard_errors"] == pytest.approx(3)
    assert found["verdict"].startswith("The keys hide something that matters: over all states, λ = 0 predicts")


def test_what_is_not_told_apart_is_not_advised():
    noise = [1, -1, 1, -1, 1, -1, 1, -1, -0.5]
    found = examined_errors(errors_of({1.0: [10] * 9, 0.5: [10 + of for of in noise]}, visits=8))
    assert "not significantly better than λ = 1" in found["verdict"] and found["verdict"].endswith(
        "Keep value_lambda 1."
    )
    zero = [14, 9, 12, 9, 11, 10, 10, 10, 10]  # more, by one standard error
    best = examined_errors(errors_of({1.0: [10] * 9, 0.9: [11] * 9, 0.8: [11] * 9, 0.5: [12] * 9, 0.0: zero}))
    assert best["verdict"].startswith("λ = 1 predicts") and best["value_lambda"] == 1


def test_wrong_keys_of_real_episodes_are_found():
    """Who wins is told at first alone: five floors later the key hides it."""
    rng = random.Random(0)

    def wrong(task: str) -> Trajectory:
        lucky = rng.random() < 0.5
        rooms = ["luck" if lucky else "none", *(f"room {rng.randrange(2)} of floor {floor}" for floor in range(5))]
        # Each room's name is the action that leads there, so that actions do not tell.
        actions = [*rooms[1:], "win" if lucky else "lose"]
        steps = [Step(room, action) for room, action in zip(rooms, actions)]
        return Trajectory(task, steps, 10.0 * lucky, "success" if lucky else "failure")

    groups = [[wrong(f"t{number}") for _ in range(24)] for number in range(20)]
    assert examined(groups, gamma=0.95)["verdict"].startswith("The keys hide something that matters")


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(monkeypatch):
    """Names of the plots that would be saved: drawing all of them takes seconds."""
    names = []
    monkeypatch.setattr(plots, "save", lambda made, folder, name, svg: names.append(name))
    return names


def write(run, groups, iterations=1):
    for number in range(1, iterations + 1):
        played = [trajectory for group in groups for trajectory in group]
        write_jsonl(run / "trajectories" / f"train-{number:06d}-rank0.jsonl", played[::2])
        write_jsonl(run / "trajectories" / f"train-{number:06d}-rank1.jsonl", played[1::2])


@pytest.mark.parametrize(
    "groups, said",
    [
        ([[episode("abab", 8.0, f"t{n}")] for n in range(3)], "No state was visited by two episodes of a group"),
        ([[episode("aba", 0.0, f"t{n}")] * 4 for n in range(3)], "Every λ predicts these returns equally well"),
        ([[episode("abc", 8.1, f"t{n}")] * 5 for n in range(9)], "Every λ predicts these returns equally well"),
        ([[episode("ab", 8.0, "t", outcome) for outcome in ("error", "lost")]], "No episode took a step that counts"),
        ([[episode("ab", 8.0), episode("ab", 0.0), episode("ab", 0.0, outcome="lost")]], "Too few groups have"),
    ],
    ids=["groups of one", "no success", "all the same", "errors", "few"],
)
@pytest.mark.filterwarnings("error")
def test_runs_with_little_to_compare_get_a_report_that_says_so(tmp_path, capsys, saved, groups, said):
    write(tmp_path, groups)
    main([str(tmp_path), "--details"])
    assert said in (printed := capsys.readouterr().out) and "nan" not in printed
    written = json.loads((tmp_path / "report" / "analysis.json").read_text(), parse_constant=pytest.fail)
    assert said in written["prediction"]["verdict"]
    assert "value_variation" in saved and "prediction_errors" not in saved


def test_the_report_takes_the_runs_gamma_and_tells_what_it_was_trained_with(tmp_path, capsys, saved):
    rng = random.Random(0)
    groups = [[episode(rng.choices("abc", k=4), 8.0 * rng.randrange(2), f"t{n}") for _ in range(6)] for n in range(12)]
    write(tmp_path, groups, iterations=3)
    described = {"trainer": {"gamma": 1.0, "value_lambda": 0.5}, "estimator": {"estimator_name": "g2po"}}
    (tmp_path / "run.json").write_text(json.dumps(described))
    main([str(tmp_path), "--details"])
    printed = capsys.readouterr().out
    assert "iterations 2 " in printed and "trained with value_lambda 0.5" in printed
    assert "prediction_errors" in saved
    read = json.loads((tmp_path / "report" / "analysis.json").read_text())
    described["trainer"]["value_lambda"], described["estimator"]["estimator_name"] = 1.0, "grpo"
    (tmp_path / "run.json").write_text(json.dumps(described))
    main([str(tmp_path), "--gamma", "0.5", "--output", str(tmp_path / "other"), "--details"])
    assert "trained with grpo: value_lambda is an option of g2po" in capsys.readouterr().out
    other = json.loads((tmp_path / "other" / "analysis.json").read_text())
    before, after = (of["prediction"]["rows"][0]["mean_squared_error"][0] for of in (read, other))
    assert 0 < after < before / 2 and other["gamma"] == 0.5


def test_the_plot_has_a_curve_for_each_class_with_intervals(tmp_path):
    falls = [0.0, -0.1, -0.2]
    curves = {"all": (falls, [[x - 0.1, x + 0.1] for x in falls]), "1-2": (falls, [[x, x] for x in falls])}
    made = plots.prediction_errors([1.0, 0.5, 0.0], curves)
    axes = made.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all", "1-2"]
    assert axes.get_xlim()[0] > axes.get_xlim()[1], "λ = 1, the paper, is at the left"
    np.testing.assert_allclose(axes.containers[0].lines[0].get_ydata(), [0, -10, -20])
    assert all(path.stat().st_size > 5000 for path in plots.save(made, tmp_path, "errors"))
