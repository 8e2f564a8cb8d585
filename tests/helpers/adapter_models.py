"""Tiny models with adapters of several kinds."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def dense():
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def mixture():
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16)
    )


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
