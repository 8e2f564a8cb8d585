"""Tiny models with adapters of several kinds."""

import torch
from causal_models import random_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def dense():
    return random_model(AutoModelForCausalLM, "qwen2", 64, **TWO_LAYERS, tie_word_embeddings=True)


def mixture():
    return random_model(AutoModelForCausalLM, "qwen3_moe", 64, num_hidden_layers=2)


CASES = {
    "linear layers": (dense, {"target_modules": ["q_proj", "down_proj"]}),
    "embeddings, and a bias": (dense, {"target_modules": ["embed_tokens", "k_proj"], "bias": "lora_only"}),
    "DoRA": (dense, {"target_modules": "all-linear", "use_dora": True}),
    "a module of its own": (dense, {"target_modules": ["v_proj"], "modules_to_save": ["norm"]}),
    "experts' parameters": (mixture, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "all linear layers of a mixture": (mixture, {"target_modules": "all-linear"}),
}


def adapted(make, options, dtype=torch.float32):
    torch.manual_seed(0)
    model = get_peft_model(make(), LoraConfig(r=2, lora_dropout=0.0, **options)).to(dtype)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 1.0 if "magnitude" in name else 0.0, 0.3)
    return model
