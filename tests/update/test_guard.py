"""A gradient that is not finite: the run stops before the optimizer steps, and says where it comes from."""

from pathlib import Path

import pytest
import torch
from letter_environment import LongLetterEnvironment
from safetensors.torch import load_file
from spoiled_gradients import spoil

from g2po_trl.update.guard import GradientGuard


def test_a_run_stops_before_the_step(make_trainer):
    options = {"max_completion_length": 4, "max_tokens_per_micro_batch": 200, "gradient_checkpointing": True}
    options |= {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = make_trainer(LongLetterEnvironment, save_strategy="steps", save_steps=1, **options)

    def is_spoiled(ids):  # the second micro-batch of the second optimizer step
        second = trainer.iteration.mini_batches[0][1]
        return trainer.state.global_step == 1 and torch.equal(ids, second["row_ids"])

    spoil(trainer.model, is_spoiled)
    with pytest.raises(FloatingPointError, match="the run stops before the optimizer steps") as error:
        trainer.train()
    first = ("input_layernorm.weight", "self_attn.q_proj.bias", "self_attn.q_proj")
    assert f"nearest to the loss {', '.join(f'model.layers.1.{name}' for name in first)}" in str(error.value)
    (checkpoint,) = Path(trainer.args.output_dir).glob("checkpoint-*")
    saved = load_file(checkpoint / "model.safetensors")
    weights = trainer.model.state_dict()
    assert saved.keys() <= weights.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)


def test_fp16_is_left_to_its_scaler(make_trainer, monkeypatch):
    """Its gradients overflow now and then, and the step is left out."""
    trainer = make_trainer(LongLetterEnvironment)

    def check(guard):
        for parameter in trainer.model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        guard.check(trainer.model)

    with pytest.raises(FloatingPointError, match="nearest to the loss"):
        check(trainer.update.guard)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    check(GradientGuard(trainer.accelerator))


def test_no_pass_takes_cudnns_attention(make_trainer):
    """Rollout, log-probabilities, the layout's comparison, and forward and backward of the update."""
    trainer = make_trainer(LongLetterEnvironment, beta=0.1, max_steps=1, gradient_checkpointing=True)
    allowed, with_gradient = set(), set()

    def note(module, arguments, output):
        with_gradient.add(output.requires_grad)
        allowed.add(torch.backends.cuda.cudnn_sdp_enabled())
        if output.requires_grad:
            output.register_hook(lambda gradient: allowed.add(torch.backends.cuda.cudnn_sdp_enabled()))

    for model in (trainer.model, trainer.ref_model):
        model.model.layers[0].self_attn.q_proj.register_forward_hook(note)
    torch.backends.cuda.enable_cudnn_sdp(True)
    trainer.train()
    assert allowed == {False} and with_gradient == {True, False}
    assert torch.backends.cuda.cudnn_sdp_enabled(), "as it was"
