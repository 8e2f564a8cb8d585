"""What only a GPU can tell: `make test-gpu`, or `python -m benchmarks.gpu.run`. The quick tests come first.

The numbers that are compared are recorded as properties, in nats, shares and GB.
"""

import gc
import importlib.util

import pytest
import torch
from families import FAMILIES, alone, gradient, in_layout, samples
from letter_environment import LongLetterEnvironment
from trl.trainer.utils import add_fused_lm_head

from benchmarks.gpu import work as gpu_work
from benchmarks.gpu.work import memory_of_recipe, recipe_trainer
from benchmarks.speed.layouts import make_shape, random_model
from g2po_trl.update.policy.probe import why_not_forked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]
DEVICE = "cuda"


def measured(model, attention, layout, dtype):
    """Log-probabilities and gradient of the samples in a layout, under autocast unless the dtype is float32."""
    sequences, scored = samples()
    if attention.startswith(("flash", "kernels")):
        try:
            model.set_attn_implementation(attention)
        except Exception as error:  # the Hub's, where the kernels package looks for it
            pytest.skip(f"{attention}: {error}")
    else:
        model.set_attn_implementation(attention)
    with torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not torch.float32):
        log_probs = in_layout(model, sequences, scored, layout)
    return log_probs.float(), gradient(model, log_probs)


def differences(model, wanted, attention, layout, dtype):
    """Largest and mean difference of log-probabilities from the wanted ones, and of the gradient by its length."""
    log_probs, slope = measured(model, attention, layout, dtype)
    nats = (log_probs - wanted[0])[wanted[0] != 0].abs()
    return nats.max().item(), nats.mean().item(), ((slope - wanted[1]).norm() / wanted[1].norm()).item()


def on_gpu(model):
    """A model on the GPU, and what it says of each sample alone: computed on the CPU in float32."""
    log_probs = alone(model, *samples())
    wanted = log_probs.detach(), gradient(model, log_probs)
    model.to(DEVICE)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model, tuple(part.to(DEVICE) for part in wanted)


@pytest.fixture(scope="module")
def qwen():
    return on_gpu(FAMILIES["Qwen2"].build())


@pytest.mark.parametrize(("attention", "layout"), [("sdpa", "padded"), ("sdpa", "shared"), ("eager", "shared")])
def test_layouts_are_exact(qwen, record_property, attention, layout):
    """A wrong path is off by tenths."""
    largest, _, by_gradient = differences(*qwen, attention, layout, torch.float32)
    record_property("largest_nats", largest)
    record_property("gradient", by_gradient)
    assert largest < 1e-3 and by_gradient < 1e-3


@pytest.mark.parametrize("attention", ["sdpa", *(gpu_work.flash_attentions() or ["flash"])])
def test_half_precision_is_as_close_as_padding(qwen, record_property, attention):
    if attention == "flash":
        pytest.skip("neither flash_attn nor kernels is installed")
    close(*qwen, attention, "shared", record_property)


@pytest.mark.parametrize("name", ["Gemma-2", "Gemma-3", "GPT-OSS", "DeepSeek-V3", "Phi-3"])
def test_families_are_as_close_as_padding(record_property, name):
    """With windows, soft caps, sinks, and values of another size than keys; in float32 and in bfloat16."""
    model, wanted = on_gpu(FAMILIES[name].build())
    attention = model.config._attn_implementation
    largest, _, by_gradient = differences(model, wanted, attention, "shared", torch.float32)
    assert largest < 1e-3 and by_gradient < 1e-3
    close(model, wanted, attention, "shared", record_property)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_hybrids_are_as_close_as_padding(record_property):
    """Gated delta rules by their own kernels, in bfloat16, whose backward pass goes through the cache's states."""
    model = gpu_work.hybrid_model(tiny=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert why_not_forked(model, torch.bfloat16) is None
        log_probs = alone(model, *samples()).float()
    wanted = log_probs.detach(), gradient(model, log_probs)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    close(model, wanted, "sdpa", "forked", record_property, 1e-3, 1e-2)


def close(model, wanted, attention, layout, record_property, nats=0.0, by_gradient=0.0):
    """In bfloat16 a layout is about as far from what is wanted as padded rows are."""
    padded = differences(model, wanted, "eager" if attention == "eager" else "sdpa", "padded", torch.bfloat16)
    found = differences(model, wanted, attention, layout, torch.bfloat16)
    for name, values in (("", found), ("_padded", padded)):
        record_property(f"mean_nats{name}", values[1])
        record_property(f"gradient{name}", values[2])
    assert found[1] < 1.5 * padded[1] + nats and found[2] < 1.5 * padded[2] + by_gradient


def test_massive_activations_are_trained_on(tmp_path):
    """By the trainer, which stops where a gradient is not finite."""
    trainer = gpu_work.massive_trainer(tmp_path)
    with gpu_work.logsumexps() as found:
        trainer.train()
    trainer.close()
    assert trainer.state.global_step == 2 and min(found) < -88.7


def test_training(make_trainer, record_property):
    """Rollout by `generate`, reference, updates: in bfloat16 with gradient checkpointing, in the shared layout."""
    trainer = make_trainer(
        LongLetterEnvironment,
        max_completion_length=4,
        use_cpu=False,
        bf16=True,
        beta=0.1,
        gradient_checkpointing=True,
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.model.device.type == DEVICE
    assert trainer.update.layout.kind == "shared" and trainer.update.layout.checked_length > 0
    logs = [log for log in trainer.state.log_history if "kl" in log]
    record_property("kl", [log["kl"] for log in logs])
    assert logs[0]["kl"] == pytest.approx(0.0, abs=1e-6) and logs[-1]["kl"] > 0, "policy and reference begin equal"
    assert any(not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before))


@pytest.mark.parametrize("name", ["qwen2.5-1.5b-lora", "qwen2.5-1.5b", "qwen2.5-7b-lora"])
def test_memory_is_what_the_recipe_counts(tmp_path, record_property, monkeypatch, name):
    """Two optimizer steps on step samples as long as the paper's, with random weights and without vLLM."""
    recipe = gpu_work.RECIPES / f"{name}.yaml"
    counted = memory_of_recipe(recipe)
    gigabytes = counted["trainer"] + counted["update"]
    if torch.cuda.mem_get_info()[0] < 1.3e9 * gigabytes + 2e9:
        pytest.skip(f"needs {1.3 * gigabytes + 2:.0f} GB of free GPU memory")
    shape = "7b" if "7b" in name else "1.5b"
    if "lora" in name:
        model = random_model(shape).to(torch.bfloat16)
    else:  # the reference is loaded from where the model is
        model = str(make_shape(tmp_path / "model", shape, torch.bfloat16))
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() * (not isinstance(model, str))
    # Few and long episodes: each slice of the rollout fills some micro-batches.
    monkeypatch.setattr(gpu_work.RecordedTrainer, "turns", 12)
    trainer = recipe_trainer(recipe, tmp_path / "out", model, per_device_train_batch_size=8 if "lora" in name else 16)
    del model
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 1e9
    record_property("counted_gb", round(gigabytes, 1))
    record_property("measured_gb", round(peak, 2))
    record_property("before_training_gb", round(before / 1e9, 2))
    record_property("model_gb", round(held / 1e9, 2))
    trainer.close()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    assert abs(peak - gigabytes) < 0.15 * gigabytes
