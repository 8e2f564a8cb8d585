"""The cost model: its phases by hand, and how they must change with episodes and ranks; and that a fit finds costs."""

from dataclasses import fields, replace

import pytest

from benchmarks.simulation import costs
from benchmarks.simulation.cost_model import FITS, fit
from benchmarks.simulation.costs import (
    SHAPES,
    Gpu,
    UnitCosts,
    Work,
    gpu_costs,
    iteration,
    limits,
    num_parameters,
    trainer_bytes,
)

WORK = Work(
    episodes=64,
    ranks=4,
    group=8,
    turns=10,
    active=0.5,
    prompt_tokens=90,
    reply_tokens=10,
    longest_reply=20,
    forwarded=0.5,
    passes=2,
    slices=2,
    micro_batch_tokens=1000,
    workers=1,
)  # 320 step samples of 100 tokens, 80 a rank, 4,000 positions a rank in 2 slices of 2 micro-batches
# phase, unit costs -> seconds, worked out on paper
BY_HAND = [
    ("generation", {"prompt_token": 1}, 80 * 90),
    ("generation", {"generated_token": 1}, 80 * 10),
    ("generation", {"decode_pass": 1}, 5 * 20),
    ("waiting", {"decode_pass": 1}, 5 * 20),
    # 8 live episodes of 100 tokens of 2 bytes in room for 400 bytes
    ("generation", {"decode_pass": 1, "kv_bytes": 2, "kv_memory": 400}, 4 * 5 * 20),
    ("waiting", {"decode_pass": 1, "kv_bytes": 2, "kv_memory": 1e9}, 5 * 20),
    ("environment", {"reset": 1}, 16),
    ("environment", {"environment_step": 1}, 16 * 5),
    ("prompts", {"played_turn": 1}, 10),
    ("prompts", {"built_prompt": 1}, 80),
    ("prompts", {"built_token": 1}, 80 * 90),
    ("advantages", {"graph": 1}, 1),
    ("advantages", {"graph_step": 1}, 320),
    ("gathered_bytes", {"step_bytes": 50}, 320 * 450),
    ("gather", {"pickled_step": 1}, 80),
    ("gather", {"unpickled_step": 1}, 320),
    ("gather", {"unpickled_byte": 1}, 320 * 400),
    ("gather", {"link": 1}, 320 * 400 * 3 / 4),
    ("batch", {"planned_step": 1}, 320),
    ("batch", {"planned_token": 1}, 320 * 100),
    ("batch", {"collated_step": 1}, 80),
    ("batch", {"collated_token": 1}, 80 * 100),
    ("logps", {"scored_token": 1}, 2 * 4000),
    ("update", {"updated_token": 1}, 4000),
    ("exchange", {"gradient_bytes": 100, "link": 1}, 3 / 4 * 2 * 2 * 100),
    ("exchange", {"weight_bytes": 100, "link": 1}, 3 / 4 * (2 + 2) * 4 * 100),
]


@pytest.mark.parametrize("phase,unit_costs,seconds", BY_HAND)
def test_by_hand(phase, unit_costs, seconds):
    assert getattr(costs, phase)(WORK, UnitCosts(**unit_costs)) == pytest.approx(seconds)


def test_every_unit_cost_is_worked_out_by_hand():
    assert {name for _, unit_costs, _ in BY_HAND for name in unit_costs} == {field.name for field in fields(UnitCosts)}


def test_phases_add_up():
    everything = UnitCosts(**{field.name: 1.0 for field in fields(UnitCosts)})
    seconds = iteration(WORK, everything)
    assert list(seconds) == [phase.__name__ for phase in costs.PHASES]
    assert all(value > 0 for value in seconds.values()) and not any(iteration(WORK, UnitCosts()).values())


def test_a_group_shares_a_worker():
    assert replace(WORK, workers=2).busiest_worker == 8 == replace(WORK, workers=100).busiest_worker
    assert replace(WORK, ranks=64).busiest_worker == 1
    assert replace(WORK, episodes=72, ranks=1, workers=4).busiest_worker == 24


def test_one_rank_exchanges_nothing():
    alone = replace(WORK, ranks=1)
    everything = UnitCosts(**{field.name: 1.0 for field in fields(UnitCosts)})
    assert costs.gather(alone, everything) == costs.gathered_bytes(alone, everything) == 0
    assert costs.exchange(alone, everything) == 0


@pytest.mark.parametrize("shape", list(costs.VLLM_SHARE))
def test_more_episodes_are_never_cheaper_and_more_ranks_never_slower(shape):
    host = UnitCosts(
        reset=0.03,
        environment_step=0.004,
        played_turn=1e-3,
        built_prompt=1e-4,
        built_token=1e-6,
        graph=1e-3,
        graph_step=1e-6,
        pickled_step=1e-5,
        unpickled_step=1e-6,
        unpickled_byte=1e-10,
        step_bytes=80,
        planned_step=1e-5,
        planned_token=1e-8,
        collated_step=1e-5,
        collated_token=1e-8,
    )
    gpu = Gpu()

    def seconds(ranks, episodes):
        w = Work(episodes, ranks)
        return iteration(w, gpu_costs(shape, gpu, w, host))

    sizes = [8, 16, 64, 120, 128, 500, 512, 1000, 2048, 8192]
    for ranks in (1, 2, 8, 64):
        for few, many in zip(sizes, sizes[1:]):
            smaller, larger = seconds(ranks, few), seconds(ranks, many)
            assert all(smaller[phase] <= larger[phase] * (1 + 1e-12) for phase in smaller)
    computed = ("generation", "waiting", "environment", "prompts", "advantages", "batch", "logps", "update")
    for episodes in sizes:
        for few, many in zip((1, 2, 4, 8, 16, 64), (2, 4, 8, 16, 64, 128)):
            slower, faster = seconds(few, episodes), seconds(many, episodes)
            assert all(faster[phase] <= slower[phase] * (1 + 1e-12) for phase in computed)


def test_what_every_rank_holds_and_plans_does_not_shrink_with_ranks():
    unit_costs = UnitCosts(step_bytes=80, planned_step=1.0, planned_token=0.1)
    two, many = replace(WORK, ranks=2), replace(WORK, ranks=32)
    assert costs.gathered_bytes(two, unit_costs) == costs.gathered_bytes(many, unit_costs) == 320 * (400 + 80)
    assert costs.batch(two, unit_costs) == costs.batch(many, unit_costs)
    twice = replace(many, episodes=128)
    assert costs.gathered_bytes(twice, unit_costs) == 2 * costs.gathered_bytes(many, unit_costs)
    assert costs.batch(twice, unit_costs) == 2 * costs.batch(many, unit_costs)


def test_parameters_and_memory_are_the_recipes():
    assert sum(num_parameters("1.5b")) == pytest.approx(1.54e9, rel=0.01)
    body, head = num_parameters("7b")
    assert body + 2 * head == pytest.approx(7.62e9, rel=0.01)
    assert trainer_bytes("1.5b", 8) == pytest.approx(30.9e9, rel=0.01), "each GPU holds all of it"
    assert trainer_bytes("7b", 8) == pytest.approx(19.0e9, rel=0.01), "sharded"
    w = Work(64)
    kv = {shape: gpu_costs(shape, Gpu(), w, UnitCosts()) for shape in SHAPES if shape in costs.VLLM_SHARE}
    assert kv["1.5b"].kv_bytes == 28 * 1024 and kv["7b"].kv_bytes == 56 * 1024
    assert kv["1.5b"].kv_memory / kv["1.5b"].kv_bytes == pytest.approx(660_000, rel=0.02)
    assert kv["7b"].kv_memory / kv["7b"].kv_bytes == pytest.approx(260_000, rel=0.03)


def test_the_limits_that_are_passed_are_named():
    def found(shape, w, gpu=None, **host):
        gpu = gpu or Gpu()
        return " ".join(limits(shape, gpu, w, gpu_costs(shape, gpu, w, UnitCosts(**host))))

    assert found("1.5b", Work(2048, 8, longest_reply=150)) == ""
    assert "GPU memory" in found("7b", Work(128, 1)) and "GPU memory" not in found("7b", Work(128, 8))
    assert "KV cache" in found("1.5b", Work(8192, 1))
    assert "environments" in found("1.5b", Work(2048, 8), environment_step=1.0)
    assert "host work" in found("1.5b", Work(8192, 64), planned_step=1e-3)
    assert "longest episode" in found("1.5b", Work(128, 64, active=0.3))
    assert "host memory" in found("1.5b", Work(8192, 64), Gpu(host_memory=1e9))
    assert "exchange" in found("7b", Work(8192, 64), Gpu(network=1e9))


@pytest.mark.parametrize("phase", list(FITS))
def test_a_fit_finds_the_costs_that_made_the_times(phase):
    parts, names = FITS[phase]
    true = UnitCosts(**{name: 10.0 ** -(i + 2) for i, name in enumerate(names)})
    works = [
        replace(WORK, episodes=episodes, ranks=ranks, turns=turns, prompt_tokens=prompt, reply_tokens=completion)
        for episodes, turns, prompt, completion in (
            (16, 10, 90, 10),
            (32, 25, 300, 40),
            (64, 15, 50, 70),
            (256, 7, 200, 9),
        )
        for ranks in (2, 4, 16)
    ]
    points = [{"work": vars(w), "seconds": {phase: [sum(part(w, true) for part in parts)] * 3}} for w in works]
    assert fit(phase, points) == pytest.approx({name: getattr(true, name) for name in names}, rel=1e-6)


def test_no_fitted_cost_is_negative():
    points = [
        {"work": vars(replace(WORK, episodes=episodes)), "seconds": {"advantages": [seconds]}}
        for episodes, seconds in (
            (16, 1.0),
            (64, 10.0),
        )  # grows faster than the steps: the fixed part would be below 0
    ]
    found = fit("advantages", points)
    assert found["graph"] == 0.0 < found["graph_step"]
