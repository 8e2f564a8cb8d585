"""Rollouts on a virtual clock: the real loops play what is recorded, and what waits for what, by hand."""

from dataclasses import replace

import pytest

from benchmarks.simulation.simulate_rollout import World, dealt, limit, predict
from benchmarks.simulation.simulated import Clock, EngineCosts, PoolCosts, Recorded, SimulatedEngine, SimulatedPool
from benchmarks.simulation.simulated_rank import Rank, all_at_once

FAST = PoolCosts(workers=4, step=1e-3, reset=0.01, first_reset=0.02)
ENGINE = EngineCosts(step=5e-3, sequence=1e-4, context=1e-7, prompt_token=1e-5, max_tokens=400, prompt=1e-4)
WORLD = World(
    "drawn", [[(n, n < 9) for n in (3, 9, 5, 9)], [(n, True) for n in (1, 2, 8, 4)]], 9, prompt=50, completion=20
)


@pytest.mark.parametrize("loop", ["turns", "streams"])
@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_the_loops_play_what_is_recorded_one_rollout_after_the_other(loop, wait):
    rank = Rank(ENGINE, FAST, 9, loop)
    for seed in range(3):
        groups = replace(WORLD, wait=wait).groups(5, seed)
        before = rank.engine.tokens
        found = rank.play(groups)
        members = [member for group in groups for member in group]
        assert found["steps"] == sum(member.turns for member in members)
        assert rank.engine.tokens - before == sum(sum(member.completions) for member in members)
        assert not rank.pool.pending and not rank.pool.answers
        waits = sum(sum(member.waits) for member in members)
        resets = found["environments"] - waits - found["steps"] * FAST.step
        assert len(members) * FAST.reset <= resets <= len(members) * FAST.first_reset
        assert found["computing"] <= found["seconds"]


def test_a_rollout_that_is_not_the_recorded_one_is_noticed():
    rank = Rank(ENGINE, FAST, 8, "streams")  # one turn less
    with pytest.raises(RuntimeError, match="not the recorded one"):
        rank.play(WORLD.groups(5, 0))


def test_nothing_waits_but_for_the_engine_whatever_the_loop_if_all_take_as_long():
    alike = [[Recorded([50] * 6, [20] * 6, [0.0] * 6, True)] * 4] * 3
    at_once = PoolCosts(workers=12, step=0.0, reset=0.0, first_reset=0.0)
    one_pass = replace(ENGINE, max_tokens=4096)  # reads all prompts
    turns, streams = (Rank(one_pass, at_once, 9, loop).play(alike) for loop in ("turns", "streams"))
    assert turns["seconds"] == pytest.approx(streams["seconds"])
    assert turns["computing"] == pytest.approx(turns["seconds"] - 72 * ENGINE.prompt)


@pytest.mark.parametrize("ahead", [1, 2])
def test_rolling_groups_play_what_is_recorded_and_fill_what_streams_leave_empty(ahead):
    world = replace(WORLD, turns=[[(9, False), (1, True), (2, True), (1, True)], [(3, True)] * 4])
    rolling, streams = (Rank(ENGINE, FAST, 9, loop) for loop in (f"rolling {ahead}", "streams"))
    others, seconds = world.groups(16 * ahead, 99), [0.0, 0.0]
    for batch in range(10):
        groups = world.groups(16, batch)
        found = [rank.play(groups, others) for rank in (rolling, streams)]
        assert found[0]["episodes"] == found[1]["episodes"] == 64
        if batch > ahead:
            seconds = [total + each["seconds"] for total, each in zip(seconds, found)]
    assert 0 < len(rolling.pool.recorded) <= 64 * ahead  # begun, and in no batch yet
    assert not streams.pool.recorded
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_streams_are_faster_than_turns_and_never_beyond_the_engine(wait):
    groups = replace(WORLD, wait=wait).groups(8, 0)
    turns, streams = (Rank(ENGINE, FAST, 9, loop).play(groups)["seconds"] for loop in ("turns", "streams"))
    assert all_at_once(groups, ENGINE) < streams < turns


def test_an_engine_by_hand():
    """Passes of 1 s, 0.1 s more for a sequence and 0.01 s for a prompt token."""
    engine = SimulatedEngine(
        Clock(), EngineCosts(step=1, sequence=0.1, prompt_token=0.01, max_tokens=30, kv_tokens=100)
    )
    engine.submit("a", 20, 3)
    engine.submit("b", 20, 2)
    engine.submit("c", 20, 40)  # there is no room for it yet
    assert engine.advance() == ["a", "b"]
    # a is read, and half of b; the rest of b, with a token of a; a token of both, the last
    assert engine.clock.now == pytest.approx((1 + 0.3) + (1 + 0.1 + 0.1) + (1 + 0.2)) and engine.tokens == 5
    assert engine.advance(until=0.0) == []


def test_a_pass_is_not_interrupted():
    engine = SimulatedEngine(Clock(), EngineCosts(step=1))
    engine.submit("a", 1, 10)
    assert engine.advance(until=2.5) == [] and engine.clock.now == 3
    assert engine.advance(until=2.5) == [] and engine.clock.now == 4
    assert engine.advance() == ["a"] and engine.clock.now == 10


def test_a_pool_by_hand():
    """Two workers, a core: members of a group share a worker, what waits needs no core."""
    clock, episode = Clock(), Recorded([1, 1], [1, 1], [5.0, 0.0], True)
    pool = SimulatedPool(clock, PoolCosts(2, step=1, reset=1, first_reset=2, cores=1))
    slots = pool.begin([{"episodes": [episode] * 2}] * 2 + [{"episodes": [episode]}], ["a", "a", "b"])
    assert list(pool.receive(None)) == [slots[0]] and clock.now == 2
    assert list(pool.receive(None)) == [slots[2]] and clock.now == 4
    assert list(pool.receive(timeout=0.5)) == [] and clock.now == 4.5
    assert list(pool.receive(None)) == [slots[1]] and clock.now == 5
    pool.send(dict.fromkeys(slots, "go"))
    assert list(pool.receive(None)) == [slots[0]] and clock.now == 11
    assert list(pool.receive(None)) == [slots[2]] and clock.now == 12
    pool.send({slots[0]: "go"})  # after the other member, in its worker
    assert list(pool.receive(None)) == [slots[1]] and clock.now == 17
    answers = pool.receive(None)
    assert answers[slots[0]].terminated and clock.now == 18
    with pytest.raises(ValueError, match="slot"):
        pool.send({slots[0]: "go"})


def test_episodes_are_dealt_to_ranks_in_order():
    groups = WORLD.groups(3, 0)
    parts = dealt(groups, 5)
    assert [member for part in parts for group in part for member in group] == [m for group in groups for m in group]


def test_ranks_wait_for_one_another_before_an_update():
    found = predict(WORLD, 3, 24, ENGINE, FAST, "streams", update=5.0, batches=3)
    parts = [dealt(WORLD.groups(3, batch), 3) for batch in range(4)]
    alone = [Rank(ENGINE, FAST, 9, "streams") for _ in range(3)]
    slowest = [max(rank.play(own)["seconds"] for rank, own in zip(alone, part)) for part in parts]
    assert found["seconds of batches"] == pytest.approx(slowest[1:], abs=0.02)
    assert found["seconds"] == pytest.approx(sum(slowest[1:]) / 3, abs=0.02)
    assert 0 < found["engine computing"] < 1
    assert 0 < limit(WORLD, 3, 24, ENGINE) < slowest[1]
