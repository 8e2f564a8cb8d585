"""`mini_batch_size`: several optimizer steps in one training step, and the weights of as many training steps."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from letter_environment import LongLetterEnvironment
from letter_trainer import flat_weights
from peft import LoraConfig

from g2po_trl.engines.transformers import TransformersEngine
from g2po_trl.update.batch import StepBatch, make_mini_batches
from g2po_trl.update.iteration import Iteration

LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
COMMON = {
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-2,
    "max_completion_length": 4,
    "beta": 0.1,
    "max_tokens_per_micro_batch": 200,
    "max_grad_norm": 0.1,
    "num_generations": 8,
    "overwrite": True,
}


def log_of(trainer):
    return [entry for entry in trainer.state.log_history if "entropy" in entry]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "num_iterations": 2},
        pytest.param({"loss_type": "grpo", "peft_config": LORA, "old_log_probs": "auto"}, marks=pytest.mark.slow),
    ],
    ids=["dapo, two passes", "grpo, LoRA, corrected"],
)
def test_the_weights_are_those_of_as_many_training_steps(make_trainer, monkeypatch, options):
    """Four optimizer steps a pass, clipped, on one rollout: bit for bit; and the log has their means."""
    monkeypatch.setattr(TransformersEngine, "is_the_model", "old_log_probs" not in options)
    options = {**COMMON, **options}
    passes = options.get("num_iterations", 1)
    common = {"logging_steps": 1, **options}
    of_steps = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 4 * passes}
    several_steps = make_trainer(LongLetterEnvironment, **common, **of_steps)
    several_steps.train()
    size = math.ceil(log_of(several_steps)[0]["update/step_samples"] / 4)
    of_parts = {"per_device_train_batch_size": 16, "mini_batch_size": size, "max_steps": passes}
    mini_batches = make_trainer(LongLetterEnvironment, **common, **of_parts)
    before = flat_weights(mini_batches)
    mini_batches.train()
    assert (flat_weights(mini_batches) - before).abs().max() > 0.01
    assert torch.equal(flat_weights(mini_batches), flat_weights(several_steps))
    ours, theirs = log_of(mini_batches), log_of(several_steps)
    assert [entry["step"] for entry in ours] == [*range(1, passes + 1)]
    assert ours[0]["update/optimizer_steps"] == theirs[0]["update/optimizer_steps"] == 4 * passes
    for number, entry in enumerate(ours):
        steps = theirs[4 * number : 4 * number + 4]
        assert len({step["grad_norm"] for step in steps}) == 4
        for name in ("grad_norm", "loss"):
            assert entry[name] == pytest.approx(sum(step[name] for step in steps) / 4, rel=1e-5, abs=1e-7)
    assert mini_batches.state.global_step == passes and mini_batches.iteration.inner_steps == 3 * passes


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(make_trainer):
    """Two iterations of several optimizer steps, a schedule that counts iterations, a checkpoint after each."""
    options = {**COMMON, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = make_trainer(LongLetterEnvironment, mini_batch_size=7, save_total_limit=2, **options)
    trainer.train()
    whole, log, steps = flat_weights(trainer), log_of(trainer), trainer.iteration.inner_steps
    assert [entry["step"] for entry in log] == [1, 2] and trainer.args.logging_steps == 1
    assert [entry["learning_rate"] for entry in log] == pytest.approx([1e-2, 1e-2 / 2])
    assert steps == sum(entry["update/optimizer_steps"] - 1 for entry in log) > 2
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    assert not list(checkpoint.glob("step_samples*")), "an iteration has ended"
    again = make_trainer(LongLetterEnvironment, mini_batch_size=7, **{**options, "overwrite": False})
    again.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(flat_weights(again), whole) and again.iteration.inner_steps == steps
    described = json.loads((Path(trainer.args.output_dir) / "run.json").read_text())
    assert described["optimizer_steps_per_iteration"] == 1 and described["trainer"]["mini_batch_size"] == 7


def test_a_mean_over_tokens_does_not_depend_on_the_mini_batches():
    """Two training steps between log lines: of 1 and of 3 tokens."""
    metrics: dict[str, list[float]] = {}
    iteration = Iteration(2, 1, metrics)
    iteration.mini_batches = [[{"weight": 1}], [{"weight": 3}]]
    for kl in (1.0, 5.0):
        with iteration.merged_metrics():
            metrics.setdefault("kl", []).append(kl)
            metrics.setdefault("clip_ratio/high_max", []).append(kl)
        state = json.loads(json.dumps(iteration.state_dict()))
        iteration.advance(0.0)
    assert metrics["kl"] == [1.0, 5.0]
    resumed = Iteration(2, 1, {})
    resumed.load_state_dict(state)
    for one in (iteration, resumed):
        one.merge_training_steps()
        assert one.metrics["kl"] == [4.0] and one.metrics["clip_ratio/high_max"] == [5.0]


def test_rows_that_fill_up_a_micro_batch_of_one_token_completions_are_not_counted(make_trainer):
    """Three samples for two ranks: the first trains one of them, and a row without tokens."""
    trainer = make_trainer(beta=0.0, token_layout="padded")
    trainer.current_gradient_accumulation_steps = 1
    prompt, ones = np.array([5, 6, 7, 8]), np.ones(2, dtype=np.float32)
    ranks = [StepBatch([prompt] * n, [np.array([9])] * n, ones[:n], ones[:n].astype(bool)) for n in (2, 1)]
    trainer.update.config.num_mini_batches = 1
    ((micro_batch,),), _ = make_mini_batches(ranks, 0, trainer.update.batching_config(), np.random.default_rng(0))
    assert micro_batch["completion_mask"].sum(1).tolist() == [1, 0]
    with trainer.update.layout.of(trainer.model, micro_batch):
        trainer.compute_loss(trainer.model.train(), micro_batch)
    logps = trainer.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1].log_softmax(-1)
    (entropy,) = trainer._metrics["train"]["entropy"]
    assert entropy == pytest.approx(-(logps.exp() * logps).sum().item(), rel=1e-5)
