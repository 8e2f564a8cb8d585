"""Rehearsals without a GPU of stages that a lent GPU runs: their raw files are what the runs have written and held.

The commands are those of a GPU, with `--shrink`, and `generate` in place of vLLM. `tests` and `speed` have theirs in
test_gpu_work.py and test_gpu_run.py.
"""

import hashlib
import json

import numpy as np
import programs
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import run
from benchmarks.gpu.table import table

# Enough turns and episodes for some to succeed, and two optimizer steps an iteration.
LONGER = ["--max_turns", "15", "--num_generations", "4", "--per_device_train_batch_size", "16"]
LONGER += ["--mini_batch_size", "48"]


def rehearse(program, folder, *words):
    """Run a command's smallest version; its results file, whose page is there."""
    flags = ["--output", folder / "out", "--seconds", "280", "--shrink", *words]
    done = programs.run("-m", f"benchmarks.gpu.{program}", *flags, cwd=run.ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((folder / "out/results.json").read_text())
    assert (folder / "out/table.md").read_text() == table(found) and found["shrink"]
    assert found["commit"] and found["machine"]["versions"]["torch"]
    return found


def played(folder, name):
    """Episodes of a file of trajectories: success, and token ids of prompts and completions."""
    lines = map(json.loads, (folder / f"trajectories/{name}.jsonl").read_text().splitlines())
    return [(line["outcome"] == "success", line["steps"]) for line in lines]


def digest_of(arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def weights_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return digest_of(weight.detach().numpy() for weight in model.parameters())


def with_tiny_model(folder, port):
    words = ["--start", run.TINY, "--work", folder / "work", "--cache_dir", folder / "cache", "--generate"]
    return [*words, "--port", str(port)]


@pytest.mark.slow
def test_repeat(tmp_path):
    words = [*with_tiny_model(tmp_path, 29710), "--arms", "invariant", "start", "--", *LONGER]
    found = rehearse("repeat", tmp_path, *words)
    assert set(found["equal until"]["invariant"].values()) == {2}, "on one CPU, with one thread, all is equal"
    for name, lines in found["digests"].items():
        folder = tmp_path / "work" / name
        assert [lines[0]["weights"], lines[1]["weights"]] == [weights_of(run.TINY), weights_of(folder)]
        assert lines[0]["weights"] != lines[1]["weights"], "the first learning rate is 0, the second is not"
        for step, line in enumerate(lines, 1):
            steps = [one for _, steps in played(folder, f"train-{step:06}") for one in steps]
            for kind, ids in (("prompts", "prompt_ids"), ("completions", "completion_ids")):
                assert line[kind] == digest_of(np.array(one[ids]) for one in steps)
    (start,) = [line for line in found["parts"]["start"]["findings"] if line.get("temperature") == 1.0]
    assert weights_of(tmp_path / "work/start") == weights_of(run.TINY)
    assert start["panel"] == pytest.approx(success(tmp_path / "work/start", "eval-000001"), abs=1e-4)


def success(folder, name):
    return np.mean([won for won, _ in played(folder, name)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "seed", "port"), [("smollm2-methods", 200, 29720), ("smollm2-rooms", 100, 29730)], ids=["learn", "rooms"]
)
def test_learning(tmp_path, stage, seed, port):
    """Two iterations of G2PO and GRPO side by side, each with its panels."""
    words = ["--stages", stage, "--winner", "full weights", "--arms", "g2po", "grpo", "--seeds", str(seed)]
    found = rehearse("pretrained", tmp_path, *with_tiny_model(tmp_path, port), *words, "--", *LONGER)
    assert len(found["parts"]) == 2
    for name, part in found["parts"].items():
        folder = tmp_path / "work" / name
        training = [line for line in part["findings"] if "success_rate" in line]
        assert [line["step"] for line in training] == [1, 2]
        for line in training:
            assert line["success_rate"] == pytest.approx(success(folder, f"train-{line['step']:06}"), abs=1e-4)
        panels = {(line["step"], line["temperature"]): line["panel"] for line in part["findings"] if "panel" in line}
        assert set(panels) == {(step, temperature) for step in (0, 1, 2) for temperature in (0.4, 1.0)}
        for (step, temperature), panel in panels.items():
            file = f"eval{'' if temperature == 1.0 else '_t0_4'}-{step:06}"
            assert len(played(folder, file)) == 12, "six games, each twice"
            assert panel == pytest.approx(success(folder, file), abs=1e-4)
    first, other = (played(tmp_path / "work" / name, "train-000001") for name in found["parts"])
    ids = [[step["completion_ids"] for _, steps in one for step in steps] for one in (first, other)]
    assert ids[0] == ids[1], "methods of a seed play the same tasks with the same weights"


def test_page_of_repeats():
    content = {
        "machine": {},
        "started": "today",
        "skipped": {"asleep": "no GPU"},
        "parts": {},
        "equal until": {"usual": {"of": 6, "weights": 2}},
        "seconds of iterations": {"usual-a": [1.0, 2.0], "usual-b": []},
    }
    lines = table(content).splitlines()
    for line in (
        "no GPU, torch None; today",
        "| asleep |  |  | skipped: no GPU |",
        "| usual | weights | 2 of 6 |",
        "| usual-a | 1.50 |",
    ):
        assert line in lines
