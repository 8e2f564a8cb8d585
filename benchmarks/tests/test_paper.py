"""The paper's analyses by hand and against simulated truth, and plots as files."""

import numpy as np
import pytest

from benchmarks.paper import analysis, figures, plots
from g2po_trl import StateGraph, Step, Trajectory, write_jsonl


def episode(keys: str, reward: float, task="t", outcome=None) -> Trajectory:
    outcome = outcome or ("success" if reward else "failure")
    return Trajectory(task, [Step(key, "go") for key in keys], reward, outcome)


def graph_of(*episodes, gamma=0.5):
    return StateGraph.from_groups([list(episodes)], gamma)


def test_group_sizes_by_hand():
    sizes = analysis.group_sizes(
        graph_of(episode("hkh", 8.0), episode("hb", 0.0), episode("hk", 8.0, outcome="error"))
    )
    assert sizes["sizes"].tolist() == [3, 1, 1]
    assert sizes["mean"] == pytest.approx(5 / 3) and sizes["mean_of_step"] == pytest.approx(11 / 5)
    assert sizes["singleton_nodes"] == pytest.approx(2 / 3) and sizes["singleton_steps"] == pytest.approx(2 / 5)


def test_value_variation_by_hand():
    # h: returns 2 and 0 (deviation sqrt 2); k: 4 and 4; b: once.
    varied = analysis.value_variation(graph_of(episode("hk", 8.0), episode("hb", 0.0), episode("k", 8.0)))
    assert varied["varying_share"] == pytest.approx(1 / 2)
    assert varied["varying_step_share"] == pytest.approx(2 / 5)
    np.testing.assert_allclose(varied["deviations"], [2**0.5])
    assert varied["mean_deviation"] == pytest.approx(2**0.5 / 2)


def test_turns_to_finish_counts_won_episodes():
    played = [episode("abc", 10.0), episode("a", 0.0), episode("ab", 10.0), episode("abcd", 10.0, outcome="error")]
    assert analysis.turns_to_finish(played).tolist() == [3, 2]


def test_numbers_of_nothing_are_nan_or_zero():
    graph = graph_of(episode("ab", 1.0, outcome="error"))
    assert np.isnan(analysis.group_sizes(graph)["mean"])
    assert np.isnan(analysis.value_variation(graph)["varying_share"])
    assert np.isnan(analysis.value_errors(graph)["value_ratio"])


# -- variances: what value_errors estimates from one group, against the spread over many groups -----------------------


def groups_of(draw, rng, number=3000):
    return [[draw(rng) for _ in range(8)] for _ in range(number)]


def spread_and_estimates(groups, gamma=0.5):
    """Variance over groups of V of the first node, and of delta to the second; means of what each group estimates."""
    values, deltas, errors = [], [], []
    for group in groups:
        graph = StateGraph.from_groups([group], gamma)
        values.append(graph.node_values[0])
        deltas.append(graph.node_values[1] - graph.node_values[0])
        errors.append(analysis.value_errors(graph))
    return np.var(values, ddof=1), np.var(deltas, ddof=1), {k: np.mean([e[k] for e in errors]) for k in errors[0]}


def test_independent_visits_have_the_variance_the_paper_assumes():
    groups = groups_of(lambda rng: episode("a", float(rng.normal(5, 2))), np.random.default_rng(0))
    spread = np.var([StateGraph.from_groups([g], 0.5).node_values[0] for g in groups], ddof=1)
    estimates = [analysis.value_errors(StateGraph.from_groups([g], 0.5)) for g in groups[:500]]
    assert spread == pytest.approx((0.5 * 2) ** 2 / 8, rel=0.1)
    assert np.mean([e["value_variance"] for e in estimates]) == pytest.approx(spread, rel=0.1)
    assert np.mean([e["value_variance_assumed"] for e in estimates]) == pytest.approx(spread, rel=0.1)
    assert estimates[0]["value_ratio"] == pytest.approx(1.0)


def test_shared_trajectories_change_both_variances_as_estimated():
    """All pass a, a, b: two visits of a that are one draw, and ends of an edge that share every draw."""
    groups = groups_of(lambda rng: episode("aab", float(rng.normal(5, 2))), np.random.default_rng(1), 2000)
    value, delta, estimated = spread_and_estimates(groups)
    assert estimated["value_variance"] == pytest.approx(
        np.mean([value, np.var([StateGraph.from_groups([g], 0.5).node_values[1] for g in groups], ddof=1)]), rel=0.1
    )
    assert estimated["edge_variance"] == pytest.approx(delta, rel=0.1)
    assert estimated["edge_variance_assumed"] > 1.5 * delta, "independent ends would be less exact"
    assert estimated["revisit_share"] == pytest.approx(1 / 3) and estimated["shared_share"] == 1.0


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_simulated_variances_are_the_papers_expressions(shared):
    sizes = (1, 4, 16)
    drawn = analysis.simulate_variances(sizes, sigma=3.0, shared=shared)
    np.testing.assert_allclose(drawn["value"], drawn["value_expected"], rtol=0.05)
    assert drawn["value_expected"].tolist() == [9.0, 9 / 4, 9 / 16]
    share = np.array([round(shared * size) / size for size in sizes])
    np.testing.assert_allclose(drawn["edge"], drawn["edge_expected"] * (1 - share), rtol=0.05, atol=1e-12)
    assert (drawn["edge"] <= drawn["edge_bound"]).all()


# -- plots ------------------------------------------------------------------------------------------------------------


def test_the_command_draws_the_figures_of_a_run(tmp_path):
    write_jsonl(tmp_path / "trajectories" / "train-000001.jsonl", [episode("aab", 8.0), episode("ab", 0.0)])
    figures.main([str(tmp_path), "--svg"])
    drawn = [path.name for path in (tmp_path / "figures").iterdir()]
    assert len(drawn) == 11 and "value_errors.json" in drawn and "turns_to_finish.svg" in drawn


def test_learning_curves_are_smoothed_over_seeds():
    made = plots.learning_curves({"g2po": [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]], "grpo": [[0.5] * 3]}, window=2)
    axes = made.axes[0]
    g2po, grpo = axes.get_lines()
    assert g2po.get_xydata().tolist() == [[2, 75], [3, 100]] and grpo.get_ydata().tolist() == [50, 50]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["g2po", "grpo"]
    assert len(axes.collections) == 2, "a band each"


def test_the_curve_of_a_run_has_every_iteration_and_its_evaluations():
    axes = plots.success_of_run([0.0, 1.0, 0.5], [(0, 0.25), (3, 0.75)], window=2).axes[0]
    single, means, evaluations = (line.get_xydata().tolist() for line in axes.get_lines())
    assert single == [[1, 0], [2, 100], [3, 50]] and means == [[1, 0], [2, 50], [3, 75]]
    assert evaluations == [[0, 25], [3, 75]] and axes.get_ylim() == (-2, 102)


def test_many_learning_curves_have_their_legend_beside_them_in_the_order_of_their_ends():
    made = plots.learning_curves({"g2po": [[0.5], [0.7]]} | {f"method {i}": [[i / 10]] for i in range(5)}, window=1)
    (legend,), axes = made.legends, made.axes[0]
    order = ["g2po", "method 4", "method 3", "method 2", "method 1", "method 0"]
    assert [text.get_text() for text in legend.get_texts()] == order
    assert axes.get_legend() is None and len(axes.collections) == 1, "one band, that of the bold line"


def test_figures_are_saved_the_same_every_time(tmp_path):
    curves = {"g2po": [[0.0, 0.5, 1.0]]}
    for folder in ("a", "b"):
        plots.save(plots.learning_curves(curves), tmp_path / folder, "curves")
    for kind in ("png", "svg"):
        assert (tmp_path / "a" / f"curves.{kind}").read_bytes() == (tmp_path / "b" / f"curves.{kind}").read_bytes()
