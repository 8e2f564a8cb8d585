"""Fewer passes: what the update knows by itself is not computed before it, and the gradient is the same."""

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from letter_environment import LongLetterEnvironment
from letter_trainer import flat_gradient, flat_weights, play_batch

from g2po_trl.update.policy.importance import importance_ratio


def counted_passes(model):
    """Return a mock that each forward pass of a model calls."""
    passes = Mock(return_value=None)
    model.base_model.register_forward_pre_hook(passes)
    return passes


def gradients(trainer, micro_batches, monkeypatch, moves_on):
    """The gradient, forward passes it took, and `sampling/*`."""
    monkeypatch.setattr(trainer.update.log_probs, "needs_old_log_probs", moves_on)
    micro_batches = [dict(micro_batch) for micro_batch in micro_batches]
    passes = counted_passes(trainer.model)
    trainer._add_log_probs([micro_batches])
    found = flat_gradient(trainer, micro_batches)
    if not moves_on:
        trainer.iteration.log(trainer.update.log_probs.metrics())
    logged = trainer._metrics["train"].items()
    metrics = {name: values.pop() for name, values in logged if name.startswith("sampling") and values}
    return found, passes.call_count, metrics


@pytest.mark.parametrize(
    ("mode", "loss_type", "layout"),
    [("token_truncate", "dapo", "shared"), ("sequence_mask", "grpo", "padded")],
)
def test_the_correction_of_vllm_takes_no_pass_of_its_own(make_trainer, monkeypatch, mode, loss_type, layout):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, loss_type=loss_type, token_layout=layout)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_clip_max = 1.05  # what the loss of TRL reads
    trainer.vllm_importance_sampling_mode = mode
    trainer.update.log_probs.correction = partial(importance_ratio, mode=mode, clip_min=None, clip_max=1.05)
    batch = play_batch(trainer)
    rng = np.random.default_rng(1)
    ((plain,), _) = trainer.update.split([batch])
    trainer.model.eval()
    with torch.no_grad():  # an engine that is off by a little, and gave no number for one token
        exact = [trainer.update.score(trainer.model, micro_batch) for micro_batch in plain]
    for micro_batch, logps in zip(plain, exact):
        noise = torch.from_numpy(rng.normal(size=logps.shape).astype(np.float32))
        micro_batch["sampling_per_token_logps"] = logps + 0.1 * noise
    plain[0]["sampling_per_token_logps"][0, 0] = float("nan")
    before, passes_before, metrics_before = gradients(trainer, plain, monkeypatch, moves_on=True)
    inside, passes, metrics = gradients(trainer, plain, monkeypatch, moves_on=False)
    assert (inside - before).norm() < 1e-5 * before.norm() and before.norm() > 0
    assert passes == len(plain) and passes_before == 2 * passes
    assert metrics == pytest.approx(metrics_before, abs=1e-5) and len(metrics) == 6
    assert 0 < metrics["sampling/importance_sampling_ratio/clipped_fraction"] < 1
    trainer.vllm_importance_sampling_correction, trainer.update.log_probs.correction = False, None
    uncorrected, _, metrics = gradients(trainer, plain, monkeypatch, moves_on=False)
    assert (uncorrected - before).norm() > 1e-3 * before.norm(), "or nothing was corrected"
    assert set(metrics) == {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"}


@pytest.mark.parametrize(
    ("options", "moves_on"),
    [
        ({}, False),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, False),
        ({"steps_per_generation": 2}, True),
        ({"num_iterations": 2}, True),
    ],
)
def test_the_acting_policy_is_computed_only_where_it_moves_on(make_trainer, options, moves_on):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, beta=0.0, **options)
    mini_batches, _ = trainer.update.split([play_batch(trainer)])
    passes = counted_passes(trainer.model)
    trainer._add_log_probs([[micro_batch for part in mini_batches for micro_batch in part]])
    assert trainer.update.log_probs.needs_old_log_probs == moves_on
    assert passes.call_count == moves_on * sum(map(len, mini_batches))


def test_the_difference_is_logged_once_an_iteration(make_trainer):
    """For any engine that gives its log-probabilities; here one that is half a nat too sure."""
    options = {"max_completion_length": 4, "beta": 0.0, "max_steps": 4, "num_iterations": 2}
    trainer = make_trainer(LongLetterEnvironment, **options)
    generate, cut = trainer.player.actor.engine.generate, trainer.update.split

    def with_logprobs(prompts, sampling, seeds):
        completions = generate(prompts, sampling, seeds)
        for completion in completions:
            completion.logprobs = [0.0] * len(completion.ids)
        return completions

    def half_a_nat(batch, step):
        mini_batches, metrics = cut(batch, step)
        for micro_batch in (micro_batch for part in mini_batches for micro_batch in part):
            with torch.no_grad():
                logps = trainer.update.score(trainer.model, micro_batch)
            micro_batch["sampling_per_token_logps"] += logps.cpu() + 0.5
        return mini_batches, metrics

    trainer.player.actor.engine.generate, trainer.update.split = with_logprobs, half_a_nat
    trainer.start_check._has_seen_engine = True  # it would refuse this one
    trainer.train()
    name = "sampling/sampling_logp_difference/mean"
    logged = [log[name] for log in trainer.state.log_history if name in log]
    assert logged == pytest.approx([0.5, 0.5], abs=1e-5)


def test_the_engines_log_probabilities_are_the_old_ones(make_trainer):
    """One pass less for each micro-batch, and the gradient of several optimizer steps is the same."""
    options = {"max_completion_length": 4, "mini_batch_size": 6, "learning_rate": 1e-2, "max_steps": 1, "beta": 0.1}
    weights, passes = {}, {}
    for which in ("trainer", "auto"):
        trainer = make_trainer(LongLetterEnvironment, old_log_probs=which, overwrite=True, **options)
        trainer.update.log_probs.score = counted = Mock(side_effect=trainer.update.log_probs.score)
        trainer.train()
        weights[which], passes[which] = flat_weights(trainer), counted.call_count
    assert passes["auto"] * 2 == passes["trainer"], "the reference's are left"
    assert (weights["auto"] - weights["trainer"]).abs().max() < 1e-4


@pytest.mark.parametrize("options", [{"bf16": True}, {"top_p": 0.9}])
def test_the_engines_log_probabilities_are_not_taken_where_they_differ(make_trainer, options):
    trainer = make_trainer(LongLetterEnvironment, old_log_probs="auto", **options)
    assert not trainer.update.log_probs.old_of_engine
    assert make_trainer(LongLetterEnvironment, old_log_probs="auto").update.log_probs.old_of_engine
