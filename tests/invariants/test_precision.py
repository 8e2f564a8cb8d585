"""In bfloat16, FSDP2 gives the same recorded samples the log-probabilities, ratios and KL that DDP gives them."""

import json
from types import SimpleNamespace

import numpy as np
import programs
import pytest
from letter_trainer import move_weights
from transformers import AutoModelForCausalLM, AutoTokenizer


def measure(policy, origin, folder, kind, steps):
    """Return what precision_script.py wrote of two ranks."""
    folder.mkdir()
    programs.run_script(2, "precision_script.py", policy, origin, folder, kind, steps)
    first, second = (json.loads(path.read_text()) for path in sorted(folder.glob("[01].json")))
    ratios = [max(pair) for pair in zip(first["ratios"], second["ratios"], strict=True)]
    return {**first, "ratios": ratios, "log_probs": first["log_probs"] | second["log_probs"]}


def test_fsdp2_rounds_neither_log_probs_nor_kl(tmp_path, tiny_model_dir):
    """Of a policy that begins as the reference, over four steps, and of one that is a known step away."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    move_weights(SimpleNamespace(model=model))
    model.save_pretrained(tmp_path / "moved")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "moved")
    whole, sharded = (measure(tiny_model_dir, tiny_model_dir, tmp_path / kind, kind, 4) for kind in ("none", "fsdp2"))
    for cell in (whole, sharded):
        assert cell["kl"][0] == 0 == cell["ratios"][0], "a policy that has not moved is the reference"
    assert sharded["kl"][1:] == pytest.approx(whole["kl"][1:], rel=0.03)
    assert sharded["ratios"][1] == pytest.approx(whole["ratios"][1], rel=0.1)
    known, of_shards = (
        measure(tmp_path / "moved", tiny_model_dir, tmp_path / f"known {kind}", kind, 1) for kind in ("none", "fsdp2")
    )
    assert known["kl"][0] > 0.01 and of_shards["kl"] == pytest.approx(known["kl"], rel=0.03)
    assert of_shards["log_probs"].keys() == known["log_probs"].keys() and len(known["log_probs"]) == 24
    for row, wanted in known["log_probs"].items():
        assert np.abs(np.subtract(of_shards["log_probs"][row], wanted)).max() <= 0.01
