"""Hooks of transformers that the trainer overrides, and options that it inherits, behave as in transformers."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from letter_environment import LetterEnvironment
from letter_trainer import TASKS, flat_weights, logged
from refusals import refused

from g2po_trl import read_jsonl

PANEL = TASKS.select(range(2))
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}


def test_a_longer_run_has_the_schedule_of_a_longer_run(make_trainer, tmp_path):
    """transformers goes on with the last rate of the shorter run, which is 0, for one step."""
    options = {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "logging_steps": 1, **CHECKPOINTS}
    make_trainer(max_steps=2, **options).train()
    longer = make_trainer(max_steps=4, **options)
    before = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    longer.train(resume_from_checkpoint=True)
    assert [entry["learning_rate"] for entry in before if "learning_rate" in entry] == [1e-2, 5e-3]
    assert logged(longer, "learning_rate") == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])


def test_a_reference_that_moves_is_in_the_checkpoint(make_trainer, tmp_path):
    options = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7}
    options |= {"learning_rate": 1e-2, "logging_steps": 1, "lr_scheduler_type": "constant", **CHECKPOINTS}
    whole = make_trainer(max_steps=3, **options)
    whole.train()
    (tmp_path / "out").rename(tmp_path / "whole")
    make_trainer(max_steps=2, **options).train()
    resumed = make_trainer(max_steps=3, **options)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "kl") == logged(whole, "kl") and logged(whole, "kl")[2] > 0
    assert torch.equal(flat_weights(whole), flat_weights(resumed))
    for ours, theirs in zip(resumed.ref_model.parameters(), whole.ref_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with refused("resume_from_checkpoint"):
        make_trainer(beta=0.5, learning_rate=1e-2, max_steps=4, **CHECKPOINTS).train(resume_from_checkpoint=True)
    (tmp_path / "out" / "checkpoint-3" / "reference" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="reference/model.safetensors"):
        resumed.train(resume_from_checkpoint=True)


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, **CHECKPOINTS}


@pytest.mark.parametrize(
    ("panels", "options"),
    [
        ({"seen": PANEL, "unseen": PANEL}, {}),
        *((PANEL, {"metric_for_best_model": name}) for name in ("eval_loss", "accuracy", "eval_a_turns")),
    ],
)
def test_a_comparison_of_evaluations_needs_a_metric_of_theirs_before_any_work(make_trainer, panels, options):
    with refused("metric_for_best_model"):
        make_trainer(eval_dataset=panels, **BEST, **options)


class Recording(LetterEnvironment):
    """Says in its first observation what `reset` was given."""

    def reset(self, seed, **row):
        return replace(super().reset(seed), text=repr({"seed": seed, **row}))


def test_reset_gets_the_same_in_training_and_in_evaluations_as_files_have(make_trainer, tmp_path):
    rows = [{"seed": n, "size": n / 2, "name": str(n), "places": [n, 1], "more": {"deep": [n]}} for n in range(4)]
    data = Dataset.from_list(rows)
    trainer = make_trainer(Recording, dataset=data, eval_dataset=data, max_steps=1, beta=0.0)
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(data, metric_key_prefix="again")
    assert [json.loads(line) for line in (tmp_path / "out" / "panels" / "eval.jsonl").open()] == rows
    for kind in ("train-000001", "eval-000001", "again-000001"):
        seen = {one.steps[0].observation for one in read_jsonl(tmp_path / "out" / "trajectories" / f"{kind}.jsonl")}
        assert seen and seen <= {repr(row) for row in rows}, kind
    with refused("again_dataset"):
        trainer.evaluate(data.with_format("numpy"), metric_key_prefix="again")
