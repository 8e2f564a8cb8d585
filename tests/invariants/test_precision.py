"""In every precision and sharding the same recorded samples give the same log-probabilities, ratio and KL."""

import functools
import json

import numpy as np
import programs
import pytest
from letter_trainer import move_weights
from sharding import needs_deepspeed
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def measure(tmp_path_factory, tiny_model_dir):
    """`measure(processes, *cells)` -> by cell ("precision:sharding"), what precision_script.py wrote, of all ranks."""
    moved = tmp_path_factory.mktemp("moved")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    move_weights(model)
    model.save_pretrained(moved)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(moved)

    @functools.cache
    def run(processes, *cells):
        output = tmp_path_factory.mktemp("precision")
        programs.run_script(processes, "precision_script.py", tiny_model_dir, moved, output, *cells, timeout=590)
        return {cell: _merge(sorted(output.glob(f"{cell.replace(':', '-')}-*.json"))) for cell in cells}

    return run


def _merge(paths):
    ranks = [json.loads(path.read_text()) for path in paths]
    merged = ranks[0] | {"log_probs": {name: row for rank in ranks for name, row in rank["log_probs"].items()}}
    for name in ("ratio_before_any_step", "ratio_after_a_step"):
        merged[name] = max(rank[name] for rank in ranks)
    return merged


def differences(cell, reference):
    """Of each token's log-probability, in nats."""
    assert cell["log_probs"].keys() == reference["log_probs"].keys() and len(reference["log_probs"]) == 24
    rows = reference["log_probs"].items()
    return np.concatenate([np.abs(np.subtract(cell["log_probs"][name], row)) for name, row in rows])


def compare(cells, reference):
    """At most so far: log-probabilities in nats, the KL relatively."""
    for name, cell in cells.items():
        log_probs, kl = (1e-5, 1e-3) if name.startswith("float32") else (0.01, 0.05)
        assert cell["layout"] == "shared"
        assert cell["kl"][0] == 0 and cell["ratio_before_any_step"] == 0, "what has not moved is the reference"
        assert differences(cell, reference).max() <= log_probs
        assert cell["kl_of_known_step"] > 0.01
        assert cell["kl_of_known_step"] == pytest.approx(reference["kl_of_known_step"], rel=kl)
        assert cell["kl"][1:] == pytest.approx(reference["kl"][1:], rel=kl)
        assert cell["ratio_after_a_step"] == pytest.approx(reference["ratio_after_a_step"], rel=0.1)


@pytest.mark.slow
def test_precision_and_sharding(measure):
    cells = measure(1, "float32:none", "autocast:none", "weights:none")
    reference = cells["float32:none"]
    kinds = [f"{dtype}:{kind}" for kind in ("none", "fsdp2") for dtype in ("float32", "autocast", "weights")]
    sharded = measure(2, *kinds)
    compare(cells | {f"{name} of two": cell for name, cell in sharded.items()}, reference)


@pytest.mark.deepspeed
@needs_deepspeed
def test_precision_under_deepspeed(measure):
    reference = measure(1, "float32:none")["float32:none"]
    kinds = [f"{precision}:{kind}" for kind in ("zero2", "zero3") for precision in ("float32", "autocast")]
    compare(measure(2, *kinds), reference)
