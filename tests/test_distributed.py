"""Two processes, with every group spread over both, do what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "distributed_script.py"


def train(output, model, loss_type, processes):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    output.mkdir()
    run = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), SCRIPT, model, output, loss_type, str(8 // processes)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(path, weights_only=True) for path in sorted(output.glob("weights-*.pt"))]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_two_processes_train_the_same_model_as_one(tmp_path, tiny_model_dir, loss_type):
    (one,) = train(tmp_path / "one", tiny_model_dir, loss_type, 1)
    first, second = train(tmp_path / "two", tiny_model_dir, loss_type, 2)
    assert torch.equal(first, second)
    start = torch.cat([p.flatten() for p in _start(tiny_model_dir)])
    moved = (one - start).norm()
    assert moved > 1e-3
    assert (first - one).norm() / moved < 1e-4


def _start(path):
    from transformers import AutoModelForCausalLM

    return [p.detach() for p in AutoModelForCausalLM.from_pretrained(path).parameters()]
