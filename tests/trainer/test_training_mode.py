"""In the loss, too, the policy is the one that played: without dropout, noise of routers and batch statistics."""

import pytest
import torch
from peft import LoraConfig
from refusals import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
NOISY = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2},  # 0.1 everywhere, as it comes
    "granite": {**SIZES, "intermediate_size": 64, "attention_dropout": 0.3},  # a number, no module
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "layerdrop": 0.5},
    "mixtral": {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1, "num_local_experts": 4,
                "router_jitter_noise": 0.5},
}  # fmt: skip
ADAPTER = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def make(make_trainer, tiny_model_dir):
    def make(kind, dtype="float32", layerdrop=None, **options):
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **ends, **NOISY[kind])
        if layerdrop is not None:
            config.layerdrop = layerdrop
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        return make_trainer(model=model, router_aux_loss_coef=0, **options)

    return make


def check(trainer):
    """Two optimizer steps of a rollout need old log-probabilities; before the first, all policies are one."""
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "kl" in entry)
    assert abs(first["kl"]) < 1e-6
    assert first["clip_ratio/region_mean"] == 0, "at a tiny learning rate"
    modules = dict(trainer.model.named_modules())
    assert trainer.model.training and not any(one.training for one in modules.values() if not list(one.children()))


OPTIONS = {"beta": 0.1, "steps_per_generation": 2, "learning_rate": 1e-9, "max_steps": 2, "logging_steps": 1}
OPTIONS |= {"per_device_train_batch_size": 4, "max_prompt_length": 200}


@pytest.mark.parametrize("kind", NOISY)
def test_the_loss_has_no_noise(make, kind):
    check(make(kind, **OPTIONS))


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_nor_with_gradient_checkpointing(make, kind):
    trainer = make(kind, gradient_checkpointing=True, **OPTIONS)
    check(trainer)
    layers = [one for one in trainer.model.modules() if getattr(one, "gradient_checkpointing", False)]
    assert layers and all(layer.training for layer in layers), "recomputed in training mode alone"


def test_noise_that_checkpointed_layers_read_themselves_is_refused_before_the_first_rollout(make):
    with refused("layerdrop"):
        make("opt", gradient_checkpointing=True, **OPTIONS)
    trainer = make("opt", gradient_checkpointing=True, layerdrop=0.0, **OPTIONS)
    with refused("model"):  # dropout of its layers, found by numbers
        trainer.train()
    assert trainer.iteration.step == 0


@pytest.mark.parametrize(("dtype", "rate", "told"), [("bfloat16", 1e-6, True), ("bfloat16", 1e-2, False)])
def test_a_step_that_rounds_away_is_told(make, caplog, dtype, rate, told):
    make("granite", dtype=dtype, **{**OPTIONS, "learning_rate": rate})
    assert ("rounds away" in caplog.text) == told


def test_adapters_have_no_dropout_either(make_trainer):
    trainer = make_trainer(peft_config=ADAPTER, **OPTIONS)
    check(trainer)
    assert trainer.update.layout.kind == "shared" and trainer.update.layout.checked_length > 0
