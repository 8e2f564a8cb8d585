"""What an engine is given of a model with an adapter: merged weights, by the base's names. The base stays as it is."""

import copy
from types import SimpleNamespace

import pytest
import torch
from adapter_models import CASES, adapted, dense
from peft import LNTuningConfig, LoraConfig, get_peft_model
from refusals import refused
from trl.generation.vllm_generation import VLLMGeneration

from g2po_trl.engines.adapter_weights import adapter_parameters, check_mergeable, merged_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_trls_and_the_base_is_untouched(case, dtype):
    model = adapted(*CASES[case], dtype)
    tied = getattr(model.config, "tie_word_embeddings", False)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    vllm = VLLMGeneration.__new__(VLLMGeneration)
    vllm.model = copy.deepcopy(model)
    vllm._dist = SimpleNamespace(gather_params=lambda parameters: torch.no_grad(), is_fsdp=False)
    expected = {name: value.clone() for name, value in vllm._iter_named_params()}
    ours = {name: value.clone() for name, value in merged_parameters(model)}
    assert list(ours) == list(expected)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    if not (case.startswith("embeddings") and tied):  # an engine has one weight for embeddings and head
        check_mergeable(model)

    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, value) in before.items():
        assert after[name] is parameter and torch.equal(parameter, value), name
    assert not any(getattr(module, "merged", False) is True for module in model.modules())
    if dtype == torch.bfloat16:
        theirs = dict(vllm.model.named_parameters())
        assert any(not torch.equal(theirs[name], value) for name, (_, value) in before.items()), "nothing was at stake"


IDS = torch.arange(20)[None]


def merged_into(base, model):
    """Load the merged weights into a model without an adapter; both compute the same. Return what was not loaded."""
    missing = base.eval().load_state_dict(dict(merged_parameters(model)), strict=False)
    assert torch.allclose(base(IDS).logits, model.eval()(IDS).logits, atol=1e-5)
    return missing


@pytest.mark.parametrize(
    ("make", "options", "left"),
    [
        (*CASES["experts' parameters"], []),
        # TRL hands on the layer's own parameters, and under the adapter's names.
        (dense, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, ["lm_head.weight"]),
    ],
)
def test_it_computes_what_the_model_with_its_adapter_computes(make, options, left):
    model, merged = adapted(make, options), make()
    assert merged_into(merged, model) == (left, [])
    with model.disable_adapter():
        assert not torch.allclose(merged(IDS).logits, model(IDS).logits, atol=1e-2)


def test_an_interrupted_pass_leaves_the_model_whole():
    model = adapted(*CASES["linear layers"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = merged_parameters(model)
    while "q_proj" not in next(weights)[0]:
        pass
    weights.close()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert dict(merged_parameters(model)).keys() == dict(dense().named_parameters()).keys()


def test_of_several_adapters_the_active_one_is_handed_on_whatever_its_name():
    config = LoraConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(dense(), config, adapter_name="policy")
    model.add_adapter("default", config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(parameter, 1.0 if ".policy." in name else 2.0)
    found = adapter_parameters(model)
    assert len(found) == 4 and not any("policy" in name for name in found), "PEFT's files have no names of adapters"
    assert all((value == 1).all() for value in found.values())


def moved(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


@pytest.mark.parametrize("active", ["policy", "plain"])
def test_modules_of_the_active_adapter_are_handed_on_whatever_its_name(active):
    """Of another adapter's module the base has its own: PEFT computes with the original then."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(dense(), config, adapter_name="policy")
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["q_proj"]))
    moved(model)
    model.set_adapter(active)
    moved(model)
    assert dict(merged_parameters(model)).keys() == dict(dense().named_parameters()).keys()
    merged_into(dense(), model)


REFUSED = [
    LoraConfig(target_modules=["q_proj", "embed_tokens"]),
    LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    LNTuningConfig(target_modules=["input_layernorm"]),
    LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1]),
    LoraConfig(target_modules=["q_proj", "down_proj"], lora_bias=True),
]


@pytest.mark.parametrize("config", REFUSED)
def test_what_an_engine_cannot_have_is_refused_and_nothing_else(config):
    model = get_peft_model(dense(), copy.deepcopy(config)).eval()
    before = model(IDS).logits
    with refused("peft_config"):
        check_mergeable(model)
    assert torch.equal(model(IDS).logits, before)
