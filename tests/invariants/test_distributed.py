"""Two processes do what one does, whatever each of them has to do, and never wait for each other in vain."""

import functools
import json

import programs
import pytest
import torch
from sharding import needs_deepspeed
from transformers import AutoModelForCausalLM


def train(output, model, scenario, loss_type, processes, sharding="none", resume="", timeout=300):
    output.mkdir(exist_ok=True)
    arguments = [model, output, scenario, loss_type, sharding, *([resume] if resume else [])]
    programs.run_script(processes, "distributed_script.py", *arguments, timeout=timeout)
    weights = [torch.load(path, weights_only=True) for path in sorted(output.glob("weights-*.pt"))]
    return weights, json.loads((output / "log.json").read_text()), output


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, tiny_model_dir):
    """What one process does in a scenario, played once for all tests that compare with it."""

    @functools.cache
    def play(scenario, loss_type):
        return train(tmp_path_factory.mktemp("one"), tiny_model_dir, scenario, loss_type, 1)

    return play


NOT_COMPARED = ("micro_batches", "forwarded_tokens", "repeated_token_fraction", "padding_fraction")
NOT_COMPARED = ("total_flos", *(f"update/{name}" for name in NOT_COMPARED))
DEEPSPEED = [pytest.mark.deepspeed, needs_deepspeed]


# By default each scenario once, the hardest sharded: all others by `make test-slow`.
@pytest.mark.parametrize(
    ("scenario", "loss_type", "sharding"),
    [
        ("groups over both ranks", "dapo", "none"),
        ("three times the samples", "dapo", "none"),
        ("a rank of errors", "ppo", "none"),
        ("a rank of errors", "grpo", "fsdp2"),
        ("several environments", "dapo", "fsdp2"),
        ("mini-batches", "grpo", "fsdp2"),
        pytest.param("groups over both ranks", "grpo", "none", marks=pytest.mark.slow),
        pytest.param("groups over both ranks", "dapo", "fsdp2", marks=pytest.mark.slow),
        pytest.param("several environments", "dapo", "none", marks=pytest.mark.slow),
        pytest.param("mini-batches", "dapo", "none", marks=pytest.mark.slow),
        pytest.param("groups over both ranks", "dapo", "zero2", marks=DEEPSPEED),
        pytest.param("groups over both ranks", "dapo", "zero3", marks=DEEPSPEED),
        pytest.param("a rank of errors", "grpo", "zero3", marks=DEEPSPEED),
        pytest.param("mini-batches", "dapo", "zero2", marks=DEEPSPEED),
        pytest.param("mini-batches", "grpo", "zero3", marks=DEEPSPEED),
    ],
)
def test_two_processes_train_as_one(tmp_path, tiny_model_dir, one_process, scenario, loss_type, sharding):
    (one,), log_of_one, _ = one_process(scenario, loss_type)
    (first, second), log_of_two, _ = train(tmp_path / "two", tiny_model_dir, scenario, loss_type, 2, sharding)
    assert torch.equal(first, second)
    moved = (one - weights_of(tiny_model_dir)).norm()
    assert moved > 1e-3
    assert (first - one).norm() / moved < 1e-5
    assert torch.equal(weights_of(tmp_path / "two"), first), "what is saved is what was trained"
    if loss_type == "ppo":
        compare_critics(tmp_path / "two", one_process(scenario, loss_type)[2])

    steps = 2 if scenario == "mini-batches" else 4
    assert len(log_of_one) == len(log_of_two) == 2 + steps, "an evaluation, the steps, the end"
    compared = 0
    for ours, theirs in zip(log_of_one, log_of_two):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if "time" in name or "per_second" in name or name in NOT_COMPARED:
                continue
            if name.endswith("token_imbalance"):
                assert value == 1.0
                continue
            expected = value if value is None else pytest.approx(value, rel=1e-5, abs=1e-5, nan_ok=True)
            assert theirs[name] == expected, name
            compared += 1
    assert compared > 20 * steps
    rollouts = [entry for entry in log_of_two if "update/step_samples" in entry]
    if scenario == "three times the samples":
        assert rollouts[0]["rollout/token_imbalance"] > 1.4, "rank 0 played three quarters of the steps"
        assert max(map(busiest, rollouts)) < 1.05
    if scenario == "a rank of errors":
        assert all(entry["episode/error_rate"] == 0.5 for entry in rollouts)
        assert [entry["rollout/token_imbalance"] for entry in rollouts] == [2.0, 2.0]
        assert max(map(busiest, rollouts)) < 1.1


def busiest(entry):
    """Tokens of the busiest rank, in even shares of all samples without what they have in common."""
    return entry["update/token_imbalance"] * (1 - entry["update/repeated_token_fraction"])


def compare_critics(two, one):
    paths = one / "critic-0.pt", two / "critic-0.pt", two / "critic-1.pt"
    alone, first, second = (torch.load(path, weights_only=True) for path in paths)
    assert torch.equal(first, second)
    assert alone[-1].abs() > 1e-3, "the head's bias has moved"
    torch.testing.assert_close(first, alone, rtol=1e-3, atol=1e-5)


def weights_of(folder):
    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()])


@pytest.mark.parametrize(
    ("scenario", "sharding"),
    [
        ("groups over both ranks", "fsdp2"),
        pytest.param("groups over both ranks", "none", marks=pytest.mark.slow),
        pytest.param("an adapter", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_resume_in_the_middle_of_an_iteration(tmp_path, tiny_model_dir, scenario, sharding):
    """From the checkpoint after the third of four steps, two to an iteration: half its step samples are in it."""
    arguments = (tiny_model_dir, scenario, "dapo", 2, sharding)
    (whole, _), _, _ = train(tmp_path / "run", *arguments, resume="auto")
    (again, other), _, _ = train(tmp_path / "run", *arguments, resume=str(tmp_path / "run" / "checkpoint-3"))
    assert torch.equal(again, whole) and torch.equal(other, whole)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_fifty_iterations_of_random_lengths_never_deadlock(tmp_path, tiny_model_dir, sharding):
    arguments = tmp_path / "run", tiny_model_dir, "random lengths", "dapo", 2, sharding
    (first, second), log, output = train(*arguments, timeout=240)
    assert torch.equal(first, second)
    rollouts = [entry for entry in log if "update/step_samples" in entry]
    assert len(rollouts) == 50 and len({entry["update/step_samples"] for entry in rollouts}) > 5
    calls = [json.loads((output / f"calls-{rank}.json").read_text()) for rank in range(2)]
    assert len(calls[0]) == len(calls[1]), "with sharded weights every rank has to make each call"
    assert all(len(rows) <= 1 or len(rows) * (max(rows) + 3) <= 150 for rows in (*calls[0], *calls[1]))
    assert max(len(rows) for rows in calls[0]) > 1 and [] in calls[0], "several in a call, and dummies"
