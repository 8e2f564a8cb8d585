"""The credit bench: a household whose rules are what they say, and a run that is the same every time."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.common import RESULTS, read_lines, read_text
from benchmarks.credit import tabular, tabular_lambda, truth, truth_figure
from benchmarks.credit.household import Household, play, softmax
from benchmarks.credit.tabular import KEYS, run


@pytest.fixture(scope="module")
def house():
    return Household.random(np.random.default_rng(0), places=4, distractors=1)


def test_the_shortest_way_wins_and_nothing_shorter(house):
    """Breadth first over the tables: the first winning step is at `shortest`."""
    reached, frontier = {house.start}, {house.start}
    for step in range(1, house.shortest + 1):
        wins = any(house.wins[state].any() for state in frontier)
        assert wins == (step == house.shortest)
        frontier = {int(n) for s in frontier for n in house.next_state[s][house.admissible[s]]} - reached
        reached |= frontier
    assert 4 <= house.shortest <= 6, "to the object, take, to the station, process, to the goal, put"


def test_rules(house):
    for number, (place, where, processed) in enumerate(house.states):
        held = [o for o, at in enumerate(where) if at == -1]
        assert len(held) <= 1
        take, put, process = house.admissible[number, 4:6], house.admissible[number, 6], house.admissible[number, 7]
        assert take.tolist() == [not held and at == place for at in where]
        assert put == bool(held) and (not process or held)
        if house.wins[number].any():
            assert held == [0] and processed and house.wins[number].nonzero()[0].tolist() == [6]
    assert house.admissible[:, 8].all() and (house.next_state[:, 8] == np.arange(len(house.states))).all()


def test_play_follows_the_policy(house):
    logits = np.zeros(house.next_state.shape)
    rng = np.random.default_rng(0)
    rollout = play(house, logits, 400, 12, 0.0, rng)
    following = house.next_state[rollout.state[:, :-1], rollout.action[:, :-1]]
    live = np.arange(11) + 1 < rollout.length[:, None]
    assert (following == rollout.state[:, 1:])[live].all()
    assert house.admissible[rollout.state, rollout.action].all() and 0 < rollout.won.mean() < 1
    start = rollout.action[:, 0]
    expected = softmax(house, logits, np.array([house.start]))[0]
    assert np.abs(np.bincount(start, minlength=9) / 400 - expected).max() < 0.1
    stuck = play(house, logits, 50, 5, 1.0, rng)
    assert (stuck.state == house.start).all() and not stuck.won.any()


def test_keys_merge_what_they_say(house):
    sizes = {name: len(set(keys(house))) for name, keys in KEYS.items()}
    assert sizes["state"] == len(house.states) and sizes["place alone"] == 4
    assert sizes["processing unseen"] * 2 >= sizes["state"] > sizes["other objects unseen"]


@pytest.fixture
def short(monkeypatch):
    """Make runs short; pools of processes are forked with it."""
    for name, value in (("iterations", 2), ("groups", 2), ("group_size", 4), ("turns", 15)):
        monkeypatch.setitem(tabular.DEFAULT, name, value)


def test_tabular(short, run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "STEPS", {"plain": [300], "unit": [1.0]})
    words = ["--output", tmp_path, "--seeds", 1, "--sweep_seeds", 1, "--sweeps", "slip", "--jobs", 2]
    run_main(tabular, *words)
    found = json.loads(read_text(tmp_path / "results.json"))
    assert set(found["unit"]) == set(tabular.METHODS) and (tmp_path / "curves.png").is_file()
    again = run("g2po", 0, "unit", 1.0)
    assert found["unit"]["g2po"]["1"]["areas"] == [round(float(np.mean(again)), 4)], "a run repeats"


def test_lambdas(short, run_main, tmp_path):
    run_main(tabular_lambda, "--output", tmp_path, "--seeds", 2, "--parts", "default", "--jobs", 2)
    runs = read_lines(tmp_path / "runs.jsonl")
    assert [one["value_lambda"] for one in runs[::2]] == tabular_lambda.LAMBDAS
    assert (
        f"| default | 2 | {np.mean([runs[0]['area'], runs[1]['area']]):.3f} |" in (tmp_path / "table.md").read_text()
    )


def test_truth(run_main, tmp_path):
    run_main(truth, "--output", tmp_path, "--houses", 1, "--iterations", 2, "--settings", "15 turns", "--jobs", 1)
    found = json.loads(read_text(tmp_path / "results.json"))["results"]["15 turns"]
    assert set(found) == set(truth.METHODS) and found["true advantage"]["cosine"]["mean"] > 0.5
    run_main(truth, "--output", tmp_path, "--houses", 1, "--settings", "15 turns", "--methods", "grpo (A_EP)")
    again = json.loads(read_text(tmp_path / "results.json"))["results"]["15 turns"]
    assert again["g2po"] == found["g2po"] and again["grpo (A_EP)"] != found["grpo (A_EP)"], "the others are kept"


def test_the_figure_of_the_truth(run_main, tmp_path):
    shutil.copy(RESULTS / "truth/results.json.gz", tmp_path)
    run_main(truth_figure, "--results", tmp_path)
    assert (tmp_path / "cosines.png").read_bytes() == (RESULTS / "truth/cosines.png").read_bytes()
