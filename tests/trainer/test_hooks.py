"""Hooks of transformers that the trainer overrides, and options that it inherits, behave as in transformers."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from letter_environment import LetterEnvironment
from letter_trainer import TASKS, flat_weights, logged
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from g2po_trl import read_jsonl, tasks_dataset
from g2po_trl.runs.panel import check_evaluations

PANEL = TASKS.select(range(2))
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}


# -- optimizers with a mode -------------------------------------------------------------------------------------------


class Averaging(torch.optim.SGD):
    """SGD on weights y, evaluated at their running mean x: with `train` and `eval`, as schedule-free optimizers."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2)
        self.param_groups[0] |= {"is_training": True, "steps": 0}

    def step(self, closure=None):
        group = self.param_groups[0]
        assert group["is_training"], "a step in evaluation mode"
        super().step(closure)
        group["steps"] += 1
        for p in group["params"]:
            mean = self.state[p].setdefault("mean", p.detach().clone())
            mean.lerp_(p.detach(), 1 / group["steps"])

    def _switch(self, training):
        group = self.param_groups[0]
        if group["is_training"] != training:
            group["is_training"] = training
            for p in group["params"]:
                if "mean" in self.state[p]:
                    p.data, self.state[p]["mean"] = self.state[p]["mean"], p.data

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)


def test_an_optimizer_with_a_mode_evaluates_and_saves_other_weights(make_trainer, tiny_model_dir, tmp_path):
    """And is resumed to the bit."""

    def make(**options):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        optimizers = (Averaging(model.parameters()), None)
        options |= {"beta": 0.0, "max_steps": 3, "lr_scheduler_type": "constant", **CHECKPOINTS}
        return make_trainer(model=model, optimizers=optimizers, **options)

    trainer = make(eval_dataset=PANEL, eval_strategy="steps", eval_steps=1)
    trained, evaluated, roll_out, play = [], [], trainer._roll_out, trainer.panels.play
    trainer._roll_out = lambda rows: trained.append(flat_weights(trainer)) or roll_out(rows)
    trainer.panels.play = lambda *args, **options: evaluated.append(flat_weights(trainer)) or play(*args, **options)
    trainer.train()
    _, y1, y2 = trained  # before steps 1, 2 and 3
    x2 = evaluated[1]  # the mean of y after steps 1 and 2
    assert not torch.equal(y1, y2)
    assert torch.allclose(x2, (y1 + y2) / 2, atol=1e-7) and not torch.allclose(x2, y2, atol=1e-7)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    saved = load_file(checkpoint / "model.safetensors")
    assert torch.equal(torch.cat([saved[name].flatten() for name, _ in trainer.model.named_parameters()]), x2)
    assert torch.equal(flat_weights(trainer), evaluated[2]), "after training: what was evaluated"
    again = make(output="again")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(flat_weights(again), flat_weights(trainer))


# -- schedules --------------------------------------------------------------------------------------------------------


def test_a_longer_run_has_the_schedule_of_a_longer_run(make_trainer, tmp_path):
    """transformers goes on with the last rate of the shorter run, which is 0, for one step."""
    options = {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "logging_steps": 1, **CHECKPOINTS}
    make_trainer(max_steps=2, **options).train()
    longer = make_trainer(max_steps=4, **options)
    before = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    longer.train(resume_from_checkpoint=True)
    assert [entry["learning_rate"] for entry in before if "learning_rate" in entry] == [1e-2, 5e-3]
    assert logged(longer, "learning_rate") == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])


# -- the reference and the weights at resumption ----------------------------------------------------------------------


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


def test_another_reference_than_the_runs_is_told(make_trainer, tiny_model_dir, caplog):
    config = AutoConfig.from_pretrained(tiny_model_dir)
    torch.manual_seed(0)
    for max_steps in (1, 2):
        model = AutoModelForCausalLM.from_config(config)  # drawn anew
        trainer = make_trainer(model=model, max_steps=max_steps, **CHECKPOINTS)
        trainer.train(resume_from_checkpoint="auto")
        trainer.close()
    assert "The reference model is not the one that the run began with" in caplog.text


# -- comparisons of evaluations ---------------------------------------------------------------------------------------

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, **CHECKPOINTS}
PANELS = {"seen": PANEL, "unseen": PANEL}


@pytest.mark.parametrize(
    ("panels", "options"),
    [
        (PANELS, {}),
        (PANELS, {"load_best_model_at_end": False, "save_strategy": "best"}),
        *((PANEL, {"metric_for_best_model": name}) for name in ("loss", "eval_loss", "accuracy", "eval_a_turns")),
    ],
)
def test_a_comparison_of_evaluations_needs_a_metric_of_theirs_before_any_work(make_trainer, panels, options):
    with refused("metric_for_best_model"):
        make_trainer(eval_dataset=panels, **{**BEST, **options})


class Scored(LetterEnvironment):
    def reset(self, seed, task_type=None):
        return super().reset(seed)

    def step(self, action):
        result = super().step(action)
        scores = {"score": self.good / 3, "score_corrected": self.good / 6, "scores": "no number"}
        return replace(result, info=scores if result.terminated else {})


def test_metrics_that_evaluations_have_are_accepted(make_trainer):
    rows = [{"seed": 0, "task_type": "walk"}, {"seed": 1, "task_type": None}]

    options = {"max_steps": 1, "environment": Scored, "other_eval_temperatures": [1.0], "logging_steps": 1, **BEST}
    panels = {"a": tasks_dataset(rows)}
    trainer = make_trainer(eval_dataset=panels, metric_for_best_model="eval_a_turns", **options)
    assert trainer.args.greater_is_better is False
    trainer.train()
    assert trainer.state.best_metric == 2.0
    for metric in trainer.evaluate():
        trainer.args.metric_for_best_model = metric
        check_evaluations(trainer.args, panels)


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
