"""The comparison of a critic's sizes: the truncated model, and numbers by hand."""

import pytest
import torch
from transformers import AutoModel

from benchmarks.learning.critic_blocks import compared, save_first_blocks
from g2po_envs.alfworld.tiny import tiny_model_path


def run(held_out, colder, training):
    played = {"1": {"success_rate": held_out}, "0.4": {"success_rate": colder}}
    return {"held_out": [played], "training": {"success": training}}


def test_a_truncated_model_has_the_first_blocks(tmp_path):
    save_first_blocks(tiny_model_path(), 2, tmp_path)
    whole, first = (AutoModel.from_pretrained(path).eval() for path in (tiny_model_path(), tmp_path))
    ids = torch.arange(12)[None]
    hidden = []
    whole.layers[1].register_forward_hook(lambda *call: hidden.append(call[-1]))
    with torch.no_grad():
        whole(ids)
        last = first(ids).last_hidden_state
        expected = hidden[0][0] if isinstance(hidden[0], tuple) else hidden[0]
        assert len(first.layers) == 2 and torch.equal(last, whole.norm(expected))


def test_differences_are_paired_by_the_seeds_that_both_have():
    whole = {1: run([0.4, 0.6], [0.5], [0.1, 0.3]), 2: run([0.6, 0.6], [0.5], [0.3]), 3: run([0.9], [0.9], [0.9])}
    first = {1: run([0.4, 0.5], [0.4], [0.1]), 2: run([0.5, 0.5], [0.5], [0.2])}
    found = compared({"whole": whole, "first": first})
    assert found["seeds"] == [1, 2]
    assert found["held-out 1.0"]["whole"] == pytest.approx([50, 60])
    assert found["held-out 1.0"]["mean"] == pytest.approx(-7.5)
    low, high = found["held-out 1.0"]["interval"]  # -5 and -10: mean ± 12.706 * 2.5
    assert (low, high) == pytest.approx((-7.5 - 31.766, -7.5 + 31.766), abs=1e-2)
    assert found["held-out 0.4"]["mean"] == pytest.approx(-5) and found["training"]["mean"] == pytest.approx(-10)
