"""Benchmarks of noise by λ: gradients' statistics by hand and where the truth is known."""

import json
from pathlib import Path

import numpy as np
import programs
import pytest

from benchmarks.credit.gradient_noise_statistics import (
    BASE,
    DISCOUNTED,
    ITERATION,
    REFERENCE,
    advantages,
    analyse,
    by_state,
    cells,
    measure,
    pair_mean,
    split_cosines,
)
from g2po_trl import StateGraph, Step, Trajectory


def episode(states: str, reward: float) -> Trajectory:
    return Trajectory("t", [Step(s, "go", state_key=s) for s in states], reward, "success" if reward else "failure")


def test_pairs_of_different_groups_by_hand():
    products = np.array([[9.0, 1.0, 2.0], [1.0, 9.0, 6.0], [2.0, 6.0, 9.0]])
    assert pair_mean(products, np.ones(3)) == pytest.approx(3), "(1 + 2 + 6) / 3"
    # Drawn as groups 0, 0, 2: the two copies of group 0 are no pair, 0 and 2 are one twice.
    assert pair_mean(products, np.array([[2.0, 0.0, 1.0], [1, 1, 1]])) == pytest.approx([2, 3])


def test_metrics_by_hand():
    """Two groups, gradients (3, 4) and (3, -4), the reference's are (1, 0): |m|² is estimated as 9 - 16."""
    own, cross, reference = np.array([[25.0, -7.0], [-7.0, 25.0]]), np.full((2, 2), 3.0), np.ones((2, 2))
    found = measure(own, cross, reference, np.ones(2))
    noise = (25 + 7) / ITERATION
    assert found["signal"] == pytest.approx(-7 / noise) and np.isnan(found["direction"]) and np.isnan(found["step"])
    own = np.array([[25.0, 9.0], [9.0, 25.0]])
    found = measure(own, cross, reference, np.ones(2))
    assert found["signal"] == pytest.approx(9 / 2) and found["direction"] == pytest.approx(1)
    assert found["step"] == pytest.approx(3 / np.sqrt(9 + 2))


def test_known_gradients_are_found():
    """Normal noise around known means: signal, angle and their product; halves agree as signal says."""
    rng, size, groups = np.random.default_rng(0), 400, 96
    mean, truth = np.zeros(size), np.zeros(size)
    mean[:2], truth[0] = (3, 4), 2.0
    shared = rng.normal(size=(groups, size))
    vectors, others = mean + shared, truth + rng.normal(size=(groups, size)) + shared  # the same episodes
    found = measure(vectors @ vectors.T, vectors @ others.T, others @ others.T, np.ones(groups))
    signal = 25 / (size / ITERATION)
    assert found["signal"] == pytest.approx(signal, rel=0.1) and found["direction"] == pytest.approx(0.6, abs=0.06)
    assert found["step"] == pytest.approx(0.6 * np.sqrt(signal / (1 + signal)), abs=0.05)
    half = groups / 2 / ITERATION * signal
    assert split_cosines(vectors @ vectors.T, 200).mean() == pytest.approx(half / (1 + half), abs=0.02)

    names = {BASE: vectors, REFERENCE: others, DISCOUNTED: others, "twice": 2 * vectors}
    products = {f"plain/{name}/own": of @ of.T for name, of in names.items()}
    products |= {f"plain/{name}/{r}": of @ names[r].T for name, of in names.items() for r in (REFERENCE, DISCOUNTED)}
    compared = analyse(products, list(names), "plain")
    assert compared["twice"]["signal, minus base"] == pytest.approx([0, 0, 0], abs=1e-9), "length does not count"
    value, low, high = compared[REFERENCE]["signal, difference"]
    assert value == pytest.approx(compared[REFERENCE]["signal"] - compared[BASE]["signal"]) and low < value < high < 0
    assert compared["twice"]["signal, difference"] == pytest.approx([0, 0, 0], abs=1e-9)
    assert len(cells(compared, "twice")) == 7 and "" not in cells(compared, "twice")
    compared[REFERENCE]["signal, interval"][0] = -0.01
    assert cells(compared, "twice")[3:] == [""] * 4, "nothing is known of a direction whose reference is noise"
    low, high = compared[BASE]["signal, interval"]
    assert low < signal < high and compared[REFERENCE]["direction"] == pytest.approx(1)


def test_baseline_by_state_by_hand():
    graph = StateGraph.from_groups([[episode("ab", 10.0), episode("aa", 0.0), episode("ac", 4.0)]], 0.5)
    # a of the first: others' visits of a paid 0, 0, 4; b: nobody else, so (0 + 4) / 2; a of the second: 10 and 4.
    expected = [10 - 4 / 3, 10 - 2, 0 - 7, 0 - 7, 4 - 10 / 3, 4 - 5]
    assert by_state(graph, graph.rewards) == pytest.approx(expected)
    alone = StateGraph.from_groups([[episode("ab", 10.0)]], 0.5)
    assert by_state(alone, alone.rewards).tolist() == [0, 0]


def test_baseline_by_state_has_no_bias():
    """Two states, a softmax over two actions in each: the mean of A times the score is the gradient of the reward."""
    p, rng = np.array([0.3, 0.6]), np.random.default_rng(0)
    pays = np.array([[[0.0, 4.0], [1.0, 10.0]], [[3.0, 3.0], [6.0, 0.0]]])  # [start, first action, second action]
    sums, groups = np.zeros(2), 1500
    for _ in range(groups):
        group, scores = [], []
        for _ in range(4):
            start, first, second = rng.random() < 0.5, rng.random() < p[0], rng.random() < p[1]
            after = "c" if first == start else "d"  # one key for two pasts: hidden, and still no bias
            group.append(episode("ab"[start] + after, pays[int(start), int(first), int(second)] + 1))
            scores += [(0, first - p[0]), (1, second - p[1])]
        graph = StateGraph.from_groups([group], 0.9)
        for (place, score), a in zip(scores, by_state(graph, graph.rewards)):
            sums[place] += a * score / 4
    mean = pays.mean(0)
    expected = [
        p[0] * (1 - p[0]) * ((1 - p[1]) * (mean[1, 0] - mean[0, 0]) + p[1] * (mean[1, 1] - mean[0, 1])),
        p[1] * (1 - p[1]) * ((1 - p[0]) * (mean[0, 1] - mean[0, 0]) + p[0] * (mean[1, 1] - mean[1, 0])),
    ]
    assert sums / groups == pytest.approx(expected, abs=0.06)


def test_g2po_is_the_sum_of_its_parts():
    group = [episode("abc", 10.0), episode("abd", 0.0), episode("bcd", 0.0), episode("ac", 10.0)]
    found = advantages({"released": [group], "memory": [group]}, 0.95, 0.1, 2)
    for value in ("1", "0.5", "0"):
        parts = found["grpo"] + found[f"A_NC λ={value} released"] + found[f"A_EC λ={value} released"]
        assert found[f"g2po λ={value} released"] == pytest.approx(parts)
    assert (found["g2po λ=0 memory"] == found["g2po λ=0 released"]).all()
    assert (found["g2po λ=0 released"] != found[BASE]).any()


@pytest.mark.slow
def test_gradients_are_those_of_the_trainer_and_runs_go_on(tmp_path, monkeypatch):
    """A method's vector of a group is the trainer's own gradient times its tokens; the command makes its table."""
    monkeypatch.setenv("HOME", str(tmp_path))
    import torch

    from benchmarks.credit.gradient_noise import make_trainer, replayed, step_gradients
    from g2po_envs.alfworld.tiny import tiny_environment, tiny_model_path
    from g2po_trl.update.batch import StepBatch

    trainer, manifest = make_trainer("short", tiny_model_path(), 4, tmp_path)
    trainer.current_gradient_accumulation_steps = 1
    played, _ = trainer.play([manifest.rows()[0]] * 8)
    environment = tiny_environment(manifest, key="memory")
    made = advantages({"released": [played], "memory": [[replayed(t, environment) for t in played]]}, 0.95, 0.1, 2)
    weights = np.where(made["g2po λ=0.5 released"] == 0, 0.1, made["g2po λ=0.5 released"])
    steps = [step for t in played for step in t.steps]
    vector = torch.from_numpy(weights).float() @ step_gradients(trainer.model.eval(), steps, weights != 0)
    batch = StepBatch.from_trajectories(played, weights)
    ((micro_batches,), _) = trainer.update.split(batch)
    trainer._add_log_probs([micro_batches])
    for micro_batch in micro_batches:
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(micro_batch)).backward()
    own = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    trainer.close()
    assert (vector + batch.summary.num_trained_tokens() * own).norm() < 1e-4 * vector.norm() and vector.norm() > 0

    command = [
        *("-m", "benchmarks.credit.gradient_noise"),
        "tried",
        "--groups",
        "4",
        "--results",
        tmp_path / "results",
    ]
    command += ["--work", tmp_path / "work"]
    done = programs.run(*command, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    run = json.loads((tmp_path / "results/tried.json").read_text())
    assert set(run["plain"]) == set(run["adam"]) == set(made) and run["plain"][BASE]["signal, minus base"][0] == 0
    assert sum(group["wins"] for group in run["played"]) == run["success"] * 32
    again = programs.run(*command, cwd=Path(__file__).parents[2])
    assert (
        again.returncode == 0 and "groups, " in again.stdout and not (tmp_path / "work/tried/gradients.npy").exists()
    )
