"""When a colocated vLLM is started with room for an adapter, and what it is then given. Without vLLM."""

import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from adapter_models import CASES, adapted, dense
from peft import IA3Config, LoraConfig, get_peft_model
from refusals import refused
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from g2po_trl.engines.adapter_weights import merged_parameters
from g2po_trl.engines.vllm_adapter import AdapterGeneration, ServedAdapter, why_merged, why_not_served
from g2po_trl.utils.trl_compat import vllm_generation_class

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


class Started(Exception):
    pass


@pytest.fixture
def start(monkeypatch):
    """Starts TRL's wrapper as `GRPOTrainer` does, with a vLLM that says what it was started with."""

    class Architecture:
        pass

    dtypes, served = {"model": torch.bfloat16}, [Architecture]
    registry = SimpleNamespace(resolve_model_cls=lambda names, config: (Architecture, "name"))

    class EngineArgs:
        def __init__(self, model, trust_remote_code):
            self.model = model

        def create_model_config(self):
            return SimpleNamespace(dtype=dtypes["model"], registry=registry, architectures=["A"])

    def llm(**options):
        raise Started({name: options[name] for name in options if "lora" in name})

    modules = {
        "vllm": SimpleNamespace(__version__="0.31.0"),
        "vllm.engine.arg_utils": SimpleNamespace(EngineArgs=EngineArgs),
        "vllm.model_executor.models": SimpleNamespace(supports_lora=lambda architecture: architecture in served),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_generation, "LLM", llm, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "is_bitsandbytes_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them

    def started(model, merge, dtype=torch.bfloat16, serves=True, **options):
        dtypes["model"] = dtype
        served[:] = [Architecture] if serves else []
        accelerator = SimpleNamespace(num_processes=1, process_index=0, local_process_index=0, is_main_process=True)
        accelerator.state = SimpleNamespace()
        monkeypatch.setattr(vllm_generation, "DistributedBackend", lambda accelerator: None)
        with vllm_generation_class(partial(AdapterGeneration, merge=merge)), pytest.raises(Started) as what:
            given = {"model": model, "accelerator": accelerator, "processing_class": None, "mode": "colocate"}
            grpo_trainer.VLLMGeneration(**given, **options)
        assert grpo_trainer.VLLMGeneration is VLLMGeneration and vllm_generation.LLM is llm
        return what.value.args[0]

    return started


def test_vllm_is_started_with_room_for_the_adapter_where_it_rounds(start, caplog):
    model = adapted(dense, ALL_LINEAR)
    room = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    assert start(model, None) == room
    assert start(get_peft_model(dense(), LoraConfig(r=65, **ALL_LINEAR)), None) == room | {"max_lora_rank": 128}
    assert start(model, None, dtype=torch.float32) == {}
    assert start(model, False, dtype=torch.float32) == room
    assert start(model, True) == {} and start(dense(), None) == {}
    assert caplog.messages == []
    assert start(model, None, serves=False) == {}
    assert start(model, None, enable_sleep_mode=True) == {}
    assert [("Architecture" in m, "sleep_mode" in m) for m in caplog.messages] == [(True, False), (False, True)]
    sys.modules["vllm"].__version__ = "0.27.1"
    assert start(model, None) == {} and "0.28" in caplog.text


def test_merging_that_was_ruled_out_is_refused(start):
    with refused("merge_adapter"):
        start(adapted(dense, CASES["DoRA"][1]), False)


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
    partly = ServedAdapter(vllm_with([ATTENTION]), model, nullcontext, None)
    assert partly.merges and "it serves no down_proj" in caplog.text and partly.load() is None
    with refused("merge_adapter"):
        ServedAdapter(vllm_with([ATTENTION]), model, nullcontext, None, merge=False)
    assert not ServedAdapter(vllm_with([ATTENTION, MLP]), model, nullcontext, None).merges


@pytest.mark.parametrize("wrapped", [[ATTENTION], [ATTENTION, MLP]])
def test_the_base_is_loaded_once_unless_it_has_the_adapter(wrapped):
    model = adapted(dense, {"target_modules": ["q_proj", "down_proj"]})
    served, names = ServedAdapter(vllm_with(wrapped), model, nullcontext, None), dict(merged_parameters(model)).keys()
    assert [name for name, _ in served.weights()] == [*names]
    assert [name for name, _ in served.weights()] == ([*names] if served.merges else [])
