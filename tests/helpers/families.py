"""A small random model of every family that people train.

`FAMILIES` maps a name to the configuration; windows and chunks are 16 tokens, so that short texts reach far beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from causal_models import random_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from trl.trainer.utils import add_fused_lm_head

from g2po_trl.update.layout import Layout
from g2po_trl.update.tree import grow, in_order, lay_out, one_each

WINDOW = 16
VOCABULARY = 384
LAYOUTS = {"shared": ("padded", "shared"), "forked": ("padded", "forked"), "padded": ("padded",)}  # to be compared
QWEN_VISION = {"vision_config": {"depth": 1, "out_hidden_size": 64}}
DEEPSTACK = {"vision_config": {**QWEN_VISION["vision_config"], "deepstack_visual_indexes": [0]}}
_WINDOW = {"sliding_window": WINDOW}
_LINEAR = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LINEAR |= {"linear_num_value_heads": 2}
_SLIDING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class Family:
    """Args:
    model_type: transformers' name. options: of the configuration, beside those of `causal_models`.
    layout: the one that is taken where `shared` is asked for; `padded`: a run finds out by number.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "shared"
    images: bool = False

    def build(self, seed: int = 0):
        auto = AutoModelForImageTextToText if self.images else AutoModelForCausalLM
        model = random_model(auto, self.model_type, VOCABULARY, seed, **self.options)
        if model.base_model is model:  # see `g2po_trl.update.layout`
            model.base_model_prefix = "model"
        return model.eval()


FAMILIES = {
    "Qwen2": Family("qwen2"),
    "Qwen2 with a window": Family("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": Family("qwen3"),
    "Qwen3 MoE": Family("qwen3_moe"),
    "Qwen3-Next": Family("qwen3_next", _LINEAR, "forked"),
    "Qwen3.5": Family("qwen3_5_text", _LINEAR, "forked"),
    "Qwen3.5 MoE": Family("qwen3_5_moe_text", _LINEAR, "forked"),
    "Qwen3.5, images": Family("qwen3_5", {**QWEN_VISION, "text_config": _LINEAR}, "forked", images=True),
    "Qwen2.5-VL": Family("qwen2_5_vl", QWEN_VISION, images=True),
    "Qwen3-VL": Family("qwen3_vl", DEEPSTACK, images=True),
    "Llama 3": Family("llama"),
    "Llama 4": Family(
        "llama4_text", {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0] * 2, "floor_scale": 256}, "forked"
    ),
    "Mistral": Family("mistral", {"sliding_window": None}),
    "Mistral with a window": Family("mistral", _WINDOW),
    "Mixtral": Family("mixtral", _WINDOW),
    "Ministral": Family("ministral", _SLIDING),
    "Ministral 3": Family("ministral3"),
    "Mistral-Small-3, images": Family("mistral3", images=True),
    "Gemma": Family("gemma"),
    "Gemma-2": Family("gemma2", _SLIDING),
    "Gemma-3": Family("gemma3_text", _SLIDING),
    "Gemma-3, images": Family("gemma3", {"text_config": _SLIDING}, images=True),
    "Gemma-4": Family("gemma4_text", {**_SLIDING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}),
    "GPT-OSS": Family("gpt_oss", _SLIDING),
    "Phi-3": Family("phi3", _WINDOW),
    "Phi-4-mini": Family("phi3", {"sliding_window": 10000, "partial_rotary_factor": 0.75}),
    "Phi-3.5 MoE": Family("phimoe", _WINDOW),
    "Granite": Family("granite", {"attention_multiplier": 0.3}),
    "Granite MoE": Family("granitemoe"),
    "Granite 4, hybrid": Family("granitemoehybrid", layout="forked"),
    "GLM-4": Family("glm4"),
    "GLM-4.5 MoE": Family("glm4_moe"),
    "SmolLM3": Family("smollm3", {"no_rope_layers": [1, 0] * 2}),
    "OLMo-2": Family("olmo2"),
    "OLMo-3": Family("olmo3", _SLIDING),
    "OLMoE": Family("olmoe"),
    "Cohere 2": Family("cohere2", _SLIDING),
    "DeepSeek-V3": Family("deepseek_v3"),
    "LFM2": Family("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "forked"),
    "Falcon-H1": Family("falcon_h1", layout="forked"),
    "Nemotron-H": Family("nemotron_h", layout="forked"),
    "Mamba-2": Family("mamba2", layout="forked"),
    "EXAONE 4": Family("exaone4", _SLIDING),
    "Ernie 4.5": Family("ernie4_5"),
    "Seed-OSS": Family("seed_oss"),
    "StarCoder2": Family("starcoder2", _WINDOW),
    "GPT-2": Family("gpt2"),
    "GPT-NeoX": Family("gpt_neox"),
    "OPT": Family("opt"),
    "Bloom": Family("bloom", layout="forked"),
    "Falcon": Family("falcon", {"new_decoder_architecture": True}, "padded"),  # its attention is not in the registry
    "Falcon with ALiBi": Family("falcon", {"alibi": True}, "forked"),
}


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
