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
from benchmarks.packs import make_packs
from benchmarks.speed.phases import make_shape, random_model
from g2po_trl.update.packing import lay_out, packed_log_probs
from g2po_trl.update.policy.probe import why_not_bounded, why_not_forked
from g2po_trl.utils.forward_pass import without_cudnn_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]
DEVICE = "cuda"
PACKED = [("sdpa", "packed"), ("sdpa", "shared"), ("flex_attention", "packed"), ("flex_attention", "shared")]


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


@pytest.fixture(scope="module")
def model_and_wanted():
    """A small Qwen2 on the GPU, and what it says of each sample alone: computed on the CPU in float32."""
    model = FAMILIES["Qwen2"].build()
    log_probs = alone(model, *samples())
    wanted = log_probs.detach(), gradient(model, log_probs)
    model.to(DEVICE)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model, tuple(part.to(DEVICE) for part in wanted)


@pytest.mark.parametrize(("attention", "layout"), [("sdpa", "padded"), *PACKED])
def test_layouts_are_exact(model_and_wanted, record_property, attention, layout):
    """Flex attention's compiled backward pass among them. A wrong mask is off by tenths."""
    largest, _, by_gradient = differences(*model_and_wanted, attention, layout, torch.float32)
    record_property("largest_nats", largest)
    record_property("gradient", by_gradient)
    assert largest < 1e-3 and by_gradient < 1e-3


@pytest.mark.parametrize(
    ("attention", "layout"), [*PACKED, *((name, "packed") for name in gpu_work.flash_attentions() or ["flash"])]
)
def test_half_precision_is_as_close_as_padding(model_and_wanted, record_property, attention, layout):
    if attention == "flash":
        pytest.skip("neither flash_attn nor kernels is installed")
    padded = differences(*model_and_wanted, "sdpa", "padded", torch.bfloat16)
    found = differences(*model_and_wanted, attention, layout, torch.bfloat16)
    record_property("mean_nats", found[1])
    record_property("mean_nats_padded", padded[1])
    record_property("gradient", found[2])
    record_property("gradient_padded", padded[2])
    assert found[1] < 1.5 * padded[1] and found[2] < 1.5 * padded[2]


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("layout", ["chained", "forked", "packed"])
def test_hybrids_are_as_close_as_padding(record_property, layout):
    """Gated delta rules by their own kernels, in bfloat16, whose backward pass goes through the cache's states."""
    model = gpu_work.hybrid_model(tiny=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        reason = (
            why_not_bounded(model, torch.bfloat16) if layout == "packed" else why_not_forked(model, torch.bfloat16)
        )
        log_probs = alone(model, *samples()).float()
    record_property("reason", reason)
    if layout == "packed" and importlib.util.find_spec("causal_conv1d") is None:
        assert reason is not None, "the convolution of transformers reads all that comes before it in the row"
        return
    assert reason is None
    wanted = log_probs.detach(), gradient(model, log_probs)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    padded = differences(model, wanted, "sdpa", "padded", torch.bfloat16)
    found = differences(model, wanted, "sdpa", layout, torch.bfloat16)
    for name, values in (("", found), ("_padded", padded)):
        record_property(f"mean_nats{name}", values[1])
        record_property(f"gradient{name}", values[2])
    assert found[1] < 1.5 * padded[1] + 1e-3 and found[2] < 1.5 * padded[2] + 1e-2


@pytest.mark.parametrize("length", [640, 704, 720, 768])
def test_attention_under_a_mask_has_a_gradient(record_property, length):
    """Where each token's logsumexp is below -88.7, as in heads of Qwen2.5. With cuDNN, 704 may be NaN: recorded."""
    found = gpu_work.masked_gradient(length, DEVICE, torch.bfloat16)
    with without_cudnn_attention():
        wanted = gpu_work.masked_gradient(length, DEVICE, torch.bfloat16)
    not_finite = sum(int((~part.isfinite()).sum()) for part in found)
    record_property("not_finite_by_default", not_finite)
    assert all(part.isfinite().all() for part in wanted)
    assert length % 128 == 64 or not_finite == 0, "rows are of such lengths"


def test_massive_activations_have_a_gradient(record_property):
    """A packed row of 704 tokens in the shared layout, in bfloat16. By default it may be NaN: recorded."""
    model, (sequences, scored) = gpu_work.massive_model().to(DEVICE), gpu_work.rows_of_704()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    layout = lay_out(make_packs(sequences, 704), sequences, scored, pad_token_id=0)
    layout = {name: tensor.to(DEVICE) for name, tensor in layout.items()}

    def slope():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            log_probs, _ = packed_log_probs(model, model.base_model, layout, torch.ones(4, 50, device=DEVICE))
        return gradient(model, log_probs.float())

    with gpu_work.logsumexps() as found, without_cudnn_attention():
        assert slope().isfinite().all()
    assert max(found) < -88.7, "or this tries nothing"
    record_property("largest_logsumexp", max(found))
    record_property("not_finite_by_default", int((~slope().isfinite()).sum()))


def test_massive_activations_are_trained_on(tmp_path):
    """By the trainer, which stops where a gradient is not finite."""
    trainer = gpu_work.massive_trainer(tmp_path)
    with gpu_work.logsumexps() as found:
        trainer.train()
    trainer.close()
    assert trainer.state.global_step == 2 and min(found) < -88.7


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_training(make_trainer, record_property, attention):
    """Rollout by `generate`, reference, updates: in bfloat16 with gradient checkpointing, in the shared layout."""
    trainer = make_trainer(
        LongLetterEnvironment,
        max_completion_length=4,
        use_cpu=False,
        bf16=True,
        beta=0.1,
        gradient_checkpointing=True,
        model_init_kwargs={"attn_implementation": attention},
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
