"""When a colocated vLLM serves an adapter, and what it is then given. Without vLLM."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from adapter_models import adapted, dense
from peft import IA3Config, LoraConfig, get_peft_model
from refusals import refused

from g2po_trl.engines.adapter_weights import merged_parameters
from g2po_trl.engines.vllm_adapter import ServedAdapter, why_merged, why_not_served

ALL_LINEAR = {"target_modules": "all-linear"}


def test_the_base_without_its_adapter():
    model = adapted(dense, ALL_LINEAR, torch.bfloat16)
    found = {name: value.clone() for name, value in merged_parameters(model, merges=False)}
    base = dict(model.unload().named_parameters())
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], value) for name, value in base.items())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (ALL_LINEAR, None),
        (ALL_LINEAR | {"use_rslora": True}, None),
        (ALL_LINEAR | {"use_dora": True}, "use_dora"),
        (ALL_LINEAR | {"modules_to_save": ["norm"]}, "modules_to_save"),
        (ALL_LINEAR | {"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        (ALL_LINEAR | {"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        (ALL_LINEAR | {"bias": "lora_only"}, "bias"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_vllm_cannot_serve_is_merged(options, named):
    reason = why_merged(adapted(dense, options))
    assert reason is None if named is None else named in reason


def test_a_base_from_files_does_not_fit_an_adapter_that_changes_it():
    pissa = adapted(dense, ALL_LINEAR | {"init_lora_weights": "pissa"})
    assert why_merged(pissa) is None, "a colocated vLLM is given the base"
    assert "init_lora_weights='pissa'" in why_not_served(pissa.active_peft_config)
    assert why_not_served(adapted(dense, ALL_LINEAR).active_peft_config) is None
    assert "one LoRA adapter" in why_not_served(IA3Config())
    assert "alora_invocation_tokens" in why_not_served(LoraConfig(alora_invocation_tokens=[1]))


def test_other_reasons_to_merge():
    model = adapted(dense, ALL_LINEAR)
    assert "vllm_enable_sleep_mode" in why_merged(model, sleeps=True)
    model.add_adapter("second", LoraConfig(r=2, **ALL_LINEAR))
    assert why_merged(model) is None
    model.base_model.set_adapter(["default", "second"])
    assert "one LoRA adapter" in why_merged(model)
    ranks = get_peft_model(dense(), LoraConfig(r=513, target_modules=["q_proj"]))
    assert "lora_r is 513" in why_merged(ranks)
    assert "one LoRA adapter" in why_merged(get_peft_model(dense(), IA3Config(**ALL_LINEAR, feedforward_modules=[])))


ATTENTION, MLP = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"


def vllm_with(wrapped):
    """A vLLM whose model has room for adapters in some modules."""
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    for name in wrapped:
        module = model
        for part in name.split("."):
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.base_layer = torch.nn.Linear(1, 1)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))


def test_modules_that_this_vllm_does_not_wrap_are_merged(caplog):
    """What it wraps shows in its modules."""
    model = adapted(dense, {"target_modules": ["q_proj", "down_proj"]})
    partly = ServedAdapter(vllm_with([MLP]), model, nullcontext, None)
    assert partly.merges and "it serves no q_proj" in caplog.text and partly.load() is None
    with refused("merge_adapter"):
        ServedAdapter(vllm_with([MLP]), model, nullcontext, None, merge=False)
    assert not ServedAdapter(vllm_with([ATTENTION, MLP]), model, nullcontext, None).merges


@pytest.mark.parametrize("wrapped", [[ATTENTION], [ATTENTION, MLP]])
def test_the_base_is_loaded_once_unless_it_has_the_adapter(wrapped):
    model = adapted(dense, {"target_modules": ["q_proj", "down_proj"]})
    served, names = ServedAdapter(vllm_with(wrapped), model, nullcontext, None), dict(merged_parameters(model)).keys()
    assert [name for name, _ in served.weights()] == [*names]
    assert [name for name, _ in served.weights()] == ([*names] if served.merges else [])
