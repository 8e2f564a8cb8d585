"""The credit bench: a household whose rules are what they say, and a run that is the same every time."""

import numpy as np
import pytest

from benchmarks.credit import tabular_lambda as credit_lambda
from benchmarks.credit.household import Household, play, softmax
from benchmarks.credit.tabular import KEYS, METHODS, run


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


@pytest.mark.parametrize("method", METHODS)
def test_runs_repeat(method):
    options = {"iterations": 3, "groups": 2, "group_size": 4}
    assert run(method, 0, "unit", 1.0, **options) == run(method, 0, "unit", 1.0, **options)


def test_g2po_learns_sooner_than_whole_episodes():
    """Steps of one length, three houses: what the bench measures over twenty."""
    area = {method: np.mean([run(method, seed, "unit", 1.0) for seed in range(3)]) for method in ("g2po", "grpo")}
    assert area["g2po"] > area["grpo"] + 0.03


def test_a_line_that_was_half_written_is_played_again(tmp_path):
    """A run of credit_lambda.py that was killed while it wrote goes on, and appends whole lines."""
    line = '{"setting": "default", "method": "g2po", "value_lambda": 1.0, "seed": 0, "area": 0.7}\n'
    path = tmp_path / "runs.jsonl"
    path.write_text(line + line[:30])
    assert credit_lambda.load(tmp_path) == {("default", "g2po", 1.0, 0): 0.7}
    assert path.read_text() == line
