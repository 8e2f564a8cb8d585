"""Tiny random models of transformers' families, made from their own default configurations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = 4  # enough for one of each kind
# Size -> the names of it in configurations.
_NAMES = {
    1: "n_group topk_group num_expert_group first_k_dense_replace mamba_n_groups n_groups mamba_ngroups",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk "
    "moe_k linear_num_key_heads linear_num_value_heads",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_blocks num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads attention_heads "
    "swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_heads "
    "index_topk",
    8: "qk_rope_head_dim qk_nope_head_dim mamba_n_heads mamba_num_heads rotary_dim",
    # Keys of which all index heads have a score of 0 tie, and `topk` breaks ties by the length of the row.
    16: "index_n_heads head_dim v_head_dim kv_lora_rank q_lora_rank swa_head_dim linear_key_head_dim "
    "linear_value_head_dim linear_head_dim mamba_d_head mamba_d_state mamba_chunk_size ssm_state_size mamba_head_dim "
    "state_size chunk_size "
    "sliding_window sliding_window_size window_size attention_window_size kv_channels global_head_dim laurel_rank "
    "hidden_size_per_layer_input dim_head d_head o_lora_rank query_pre_attn_scalar block_size attention_head_size "
    "shape_embed_dim pronunciation_embed_dim adapter_rank mamba_headdim",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size router_hidden_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size index_head_dim "
    "attention_chunk_size attention_head_dim",
    64: "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim embedding_size lru_width "
    "hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size dff dim_ff d_inner "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size",
    99: "shape_vocab_size pronunciation_vocab_size encoder_hash_byte_group_vocab",
    128: "attention_hidden_size mamba_d_ssm",
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
# What changes logits is 1 by default in many configurations, and would be seen in none of them.
_VALUES = {
    **{"logit_scale": 0.5, "logits_scaling": 2.0, "lm_head_multiplier": 0.5, "lm_head_bias": True},
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 10.0),
    **{"initializer_range": 0.15, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), {"head_dim": 8}),
    # By default, 32 layers of which none of the first four attends.
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 16}),
    **dict.fromkeys(("dots3_note_text", "dots3_note_vision_encoder"), {"per_layer_config": None}),
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [2, 3, 3]}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 96, "activation_sparsity_pattern": None},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        **{"index_n_heads": 2, "index_block_size": 4, "index_topk_blocks": 2},
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    },
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    **dict.fromkeys(("qwen2_5_vl_text", "qwen3_vl_text"), {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}),
    "reformer": {
        **{"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48], "num_buckets": 4},
        **{"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_key_value_heads": 4},
    "zamba2": {"num_key_value_heads": 4, "hybrid_layer_ids": [1, 3], "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_model(model_type: str, vocabulary: int, seed: int = 0) -> torch.nn.Module:
    """Return a random causal language model, whose logits are not all near 0; raises what transformers raises."""
    model = random_model(AutoModelForCausalLM, model_type, vocabulary, seed)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


def random_model(auto, model_type: str, vocabulary: int, seed: int = 0, **options: Any) -> torch.nn.Module:
    """Return a small random model; `options` of its configuration, of parts in dicts."""
    torch.manual_seed(seed)
    config = _shrunk(AutoConfig.for_model(model_type), vocabulary, options)
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # zeros and ones would hide what a bias or a norm does
            if parameter.ndim < 2 or "position" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _shrunk(config: PretrainedConfig, vocabulary: int, options: dict[str, Any]) -> PretrainedConfig:
    """Return the default configuration with small sizes, one layer of each kind and logits that are changed."""
    whole = config.to_dict()
    numbers = {name for name, value in whole.items() if isinstance(value, (int, float)) and value is not True}
    small: dict[str, Any] = {name: _SIZES[name] for name in numbers & _SIZES.keys()}
    small |= {name: value for name, value in _VALUES.items() if name in numbers or name.endswith("token_id")}
    small |= dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), vocabulary)
    small["is_decoder"] = True
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
        if isinstance(whole.get(name), list):
            kinds = list(dict.fromkeys(whole[name]))
            small[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    if "kv_lora_rank" in whole:
        small["num_key_value_heads"] = LAYERS
    for name in config.sub_configs:
        if (part := getattr(config, name)) is not None:
            small[name] = _shrunk(part, vocabulary, options.get(name, {}))
    small = {name: value for name, value in small.items() if name in whole} | _MODEL_OPTIONS.get(config.model_type, {})
    return type(config)(**small | {name: one for name, one in options.items() if name not in config.sub_configs})
