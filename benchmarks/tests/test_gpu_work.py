"""What a GPU is given to do, on a CPU: a fault here would cost time on a GPU."""

import importlib.util
import json

import programs
import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.gpu import run, work
from g2po_trl.rollout.player import Player


def test_recorded_episodes_are_trained_on_and_none_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr(Player, "play", lambda *args, **kwargs: pytest.fail("an episode was played"))
    recorded = work.massive_trainer(tmp_path, use_cpu=True, per_device_train_batch_size=16)
    before = [weight.detach().clone() for weight in recorded.model.parameters()]
    recorded.train()
    recorded.close()
    log = next(log for log in recorded.state.log_history if "episode/turns" in log)
    assert log["episode/turns"] == recorded.turns and 0 < log["episode/success_rate"] < 1
    assert any(not torch.equal(old, new) for old, new in zip(before, recorded.model.parameters()))


@pytest.mark.slow
def test_checkpointing_is_what_a_row_says(tmp_path):
    """The memory of a layer's activations tells; here the count of passes does, on the smallest of inputs."""
    found = tmp_path / "found.jsonl"
    code = (
        "import torch, transformers.modeling_layers as layers\n"
        "plain, rows = layers.GradientCheckpointingLayer.__call__, set()\n"
        "def called(self, *args, **kwargs):\n"
        "    if torch.is_grad_enabled():\n"  # log-probabilities alone switch it off
        "        rows.add(self.gradient_checkpointing and self.training)\n"
        "    return plain(self, *args, **kwargs)\n"
        "layers.GradientCheckpointingLayer.__call__ = called\n"
        "import benchmarks.gpu.phases as phases\n"
        "measure = phases.measure\n"
        "def measured(*args):\n"
        "    rows.clear()\n"
        "    return measure(*args) | {'checkpointed': sorted(rows)}\n"
        "phases.measure = measured\n"
        "phases.main()\n"
    )
    flags = ["--findings", found, "--seconds", "60", "--turns", "2", "--shrink"]
    done = programs.run("-c", code, *flags, cwd=run.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in map(json.loads, found.read_text().splitlines()) if "checkpointed" in row]
    assert {row["gradient_checkpointing"] for row in rows} == {True, False}
    assert all(row["checkpointed"] == [row["gradient_checkpointing"]] for row in rows)


@pytest.fixture
def tests_of_a_gpu(monkeypatch):
    """The module of tests/gpu, on this machine's CPU."""
    spec = importlib.util.spec_from_file_location("test_gpu", run.ROOT / "tests/gpu/test_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)  # bfloat16 of a trainer before
    return module


def test_hybrids_pass_here_what_a_gpu_is_asked(tests_of_a_gpu):
    """By transformers' own rules in place of kernels."""
    recorded = {}
    tests_of_a_gpu.test_hybrids_are_as_close_as_padding(recorded.__setitem__)
    assert len(recorded) == 4 and all(0 < value < 0.1 for value in recorded.values())


def test_layouts_pass_here_what_a_gpu_is_asked(tests_of_a_gpu):
    found = tests_of_a_gpu.qwen.__wrapped__()
    for layout in ("padded", "shared"):
        tests_of_a_gpu.test_layouts_are_exact(found, lambda *recorded: None, "sdpa", layout)
    tests_of_a_gpu.test_half_precision_is_as_close_as_padding(found, lambda *recorded: None, "sdpa")


@pytest.mark.parametrize("name", ["Gemma-2", "GPT-OSS"])
def test_families_pass_here_what_a_gpu_is_asked(tests_of_a_gpu, name):
    tests_of_a_gpu.test_families_are_as_close_as_padding(lambda *recorded: None, name)


@pytest.mark.slow
def test_layouts_of_a_hybrid_are_measured(tmp_path):
    """They are not those of other models, whose trees its layers do not take."""
    flags = ["--findings", tmp_path / "found.jsonl", "--seconds", "30", "--turns", "2", "--shrink"]
    done = programs.run("-m", "benchmarks.gpu.phases", *flags, "--hybrid", "--conversations", cwd=run.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    rows = {row["layout"]: row for row in found if "layout" in row}
    assert not any("error" in row for row in rows.values())
    assert rows["forked"]["positions"] < rows["padded"]["positions"] / 2
