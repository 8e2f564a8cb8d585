"""A small random model of every family that people train, built from transformers' own configurations.

`FAMILIES` maps a name to the configuration; windows and chunks are 16 tokens, so that short texts reach far beyond.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from trl.trainer.utils import add_fused_lm_head

from g2po_trl.update.layout import Layout
from g2po_trl.update.tree import grow, in_order, lay_out, one_each

WINDOW = 16
VOCABULARY = 384

_OMITTED = "left out"
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # as trained weights do, attention then looks at some tokens more than at others
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_WINDOW = {"sliding_window": WINDOW}
_SLIDING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


LAYOUTS = {"shared": ("padded", "shared"), "forked": ("padded", "forked"), "padded": ("padded",)}  # to be compared


@dataclass(frozen=True)
class Family:
    """Args:
    model_type: transformers' name. options: of the configuration, beside those that all share.
    text: options of the text part, for a model that reads images too.
    layout: the one that is taken where `shared` is asked for; `padded`: a run finds out by number.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    layout: str = "shared"

    def config(self):
        options = copy.deepcopy(self.options)
        if self.text is None:
            options = {**_BASE, **options}
            return AutoConfig.for_model(self.model_type, **{k: v for k, v in options.items() if v != _OMITTED})
        text_type = AutoConfig.for_model(self.model_type).get_text_config().model_type
        options["text_config"] = {"model_type": text_type, **_BASE, **copy.deepcopy(self.text)}
        return AutoConfig.for_model(
            self.model_type, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, **options
        )

    def build(self, seed: int = 0):
        torch.manual_seed(seed)
        auto = AutoModelForCausalLM if self.text is None else AutoModelForImageTextToText
        model = auto.from_config(self.config(), dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # zeros and ones would hide what a bias or a norm does
                if parameter.ndim < 2 or "position" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        if model.base_model is model:  # see `g2po_trl.update.layout`
            model.base_model_prefix = "model"
        return model.eval()


FAMILIES = {
    "Qwen2": Family("qwen2"),
    "Qwen2 with a window": Family("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": Family("qwen3"),
    "Qwen3 MoE": Family("qwen3_moe", {**_EXPERTS, "num_experts": 4}),
    "Qwen3-Next": Family(
        "qwen3_next", {**_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32}, layout="forked"
    ),
    "Qwen3.5": Family("qwen3_5_text", _LINEAR, layout="forked"),
    "Qwen3.5 MoE": Family(
        "qwen3_5_moe_text",
        {**_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32},
        layout="forked",
    ),
    "Qwen3.5, images": Family(
        "qwen3_5",
        {"vision_config": _QWEN_VISION},
        text=_LINEAR,
        layout="forked",
    ),
    "Qwen2.5-VL": Family(
        "qwen2_5_vl",
        {"vision_config": _QWEN_VISION},
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    ),
    "Qwen3-VL": Family(
        "qwen3_vl",
        {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    ),
    "Llama 3": Family("llama"),
    "Llama 4": Family(
        "llama4_text",
        {
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 256,
        },
        layout="forked",
    ),
    "Mistral": Family("mistral", {"sliding_window": None}),
    "Mistral with a window": Family("mistral", _WINDOW),
    "Mixtral": Family("mixtral", {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ministral": Family("ministral", _SLIDING),
    "Ministral 3": Family("ministral3"),
    "Mistral-Small-3, images": Family(
        "mistral3", {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16}}, text={}
    ),
    "Gemma": Family("gemma"),
    "Gemma-2": Family("gemma2", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "Gemma-3": Family("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "Gemma-3, images": Family(
        "gemma3",
        {
            "vision_config": _VISION,
            "image_token_index": 380,
            "boi_token_index": 381,
            "eoi_token_index": 382,
            "mm_tokens_per_image": 4,
        },
        text={**_SLIDING, "query_pre_attn_scalar": 16},
    ),
    "Gemma-4": Family(
        "gemma4_text",
        {
            **_SLIDING,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 16,
        },
    ),
    "GPT-OSS": Family("gpt_oss", {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Phi-3": Family("phi3", {"sliding_window": WINDOW}),
    "Phi-4-mini": Family("phi3", {"sliding_window": 10000, "partial_rotary_factor": 0.75}),
    "Phi-3.5 MoE": Family("phimoe", {**_WINDOW, "num_local_experts": 4}),
    "Granite": Family("granite", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "Granite MoE": Family("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Granite 4, hybrid": Family(
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        layout="forked",
    ),
    "GLM-4": Family("glm4"),
    "GLM-4.5 MoE": Family(
        "glm4_moe", {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    ),
    "SmolLM3": Family("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "OLMo-2": Family("olmo2"),
    "OLMo-3": Family("olmo3", _SLIDING),
    "OLMoE": Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Cohere 2": Family("cohere2", {**_SLIDING, "logit_scale": 0.5}),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "LFM2": Family(
        "lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}, layout="forked"
    ),
    "Falcon-H1": Family("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128}, layout="forked"),
    "Nemotron-H": Family(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
        layout="forked",
    ),
    "Mamba-2": Family(
        "mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}, layout="forked"
    ),
    "EXAONE 4": Family("exaone4", _SLIDING),
    "Ernie 4.5": Family("ernie4_5"),
    "Seed-OSS": Family("seed_oss"),
    "StarCoder2": Family("starcoder2", _WINDOW),
    "GPT-2": Family("gpt2", {"n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4}),
    "GPT-NeoX": Family("gpt_neox"),
    "OPT": Family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Bloom": Family("bloom", {"n_layer": 3, "n_head": 4}, layout="forked"),
    "Falcon": Family(
        "falcon",
        {"head_dim": _OMITTED, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        layout="padded",  # its attention is not in the registry
    ),
    "Falcon with ALiBi": Family("falcon", {"head_dim": _OMITTED, "alibi": True}, layout="forked"),
}


# -- samples, and what the model says of each alone -------------------------------------------------------------------

_LENGTHS = [  # tokens, of which the first are the same as others', and of which the last are scored
    (6, 4, 2),  # below the window,
    (15, 4, 5),
    (12, 4, 3),
    (16, 4, 4),  # at it,
    (17, 8, 4),
    (18, 8, 6),
    (30, 12, 8),  # and beyond
    (33, 20, 5),
    (40, 33, 6),
    (64, 40, 9),
    (90, 40, 12),
    (120, 40, 7),
]
_TURNS = {11: 9, 9: 5}  # sequences that others begin with, and how many tokens follow
ROW_TOKENS = 200


def samples(seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Sequences that begin alike, and how many of the last tokens of each are scored."""
    rng = np.random.default_rng(seed)
    root = rng.integers(3, 300, 40)
    sequences = [np.concatenate([root[:same], rng.integers(3, 300, length - same)]) for length, same, _ in _LENGTHS]
    sequences += [np.concatenate([sequences[of], rng.integers(3, 300, more)]) for of, more in _TURNS.items()]
    scored = [scored for _, _, scored in _LENGTHS] + [4] * len(_TURNS)
    return [sequence.astype(np.int32) for sequence in sequences], scored


def alone(model, sequences: list[np.ndarray], scored: list[int]) -> torch.Tensor:
    """(rows, C) log-probabilities by the model's own forward pass, one sequence after the other, without padding."""
    rows = []
    for sequence, last in zip(sequences, scored):
        ids = torch.from_numpy(sequence)[None].long().to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -last - 1 : -1].float()
        rows.append(torch.log_softmax(logits, -1).gather(1, ids[0, -last:, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def in_layout(model, sequences: list[np.ndarray], scored: list[int], layout: str) -> torch.Tensor:
    """The same, in a layout of ours; the model has TRL's fused LM head."""
    layout_of = Layout("padded", model, Accelerator(cpu=True))
    trees = [one_each(range(len(sequences)), list(map(len, sequences)))]
    if layout != "padded":
        cost = 8 if layout == "forked" else None  # so that short texts fork, several times one after the other
        trees = [[tree] for tree in grow(*in_order(sequences, range(len(sequences))), ROW_TOKENS, cost)]
    order = torch.tensor([row for of_row in trees for tree in of_row for row in tree.rows])
    found = []
    for of_row in trees:
        rows = [row for tree in of_row for row in tree.rows]
        mask = torch.arange(max(scored)) < torch.tensor(scored)[rows, None]
        with layout_of.of(model, lay_out(of_row, sequences, scored, pad_token_id=0)):
            found.append(layout_of.log_probs(model, mask.to(model.device), False)[0])
    return torch.cat(found)[order.argsort()]


def gradient(model, log_probs: torch.Tensor) -> torch.Tensor:
    """Of a weighted sum of the log-probabilities, in all parameters."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, log_probs.numel(), device=log_probs.device).view(log_probs.shape)
    (log_probs * weights).sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def errors(family: Family, layouts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By layout: the largest difference of a log-probability, in nats, and the gradient's difference by its length."""
    model, (sequences, scored) = family.build(), samples()
    wanted = alone(model, sequences, scored)
    length = gradient(model, wanted)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    found = {}
    for layout in layouts:
        log_probs = in_layout(model, sequences, scored, layout)
        nats = (log_probs - wanted).abs().max().item()
        found[layout] = nats, ((gradient(model, log_probs) - length).norm() / length.norm()).item()
    return found
