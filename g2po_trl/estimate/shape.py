"""The shape of a model: what memory and FLOPs follow from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# From the models' config.json, so that the Hub is not needed: hidden size, intermediate size, layers, heads, key-value
# heads, vocabulary, tied embeddings. They are Qwen2 models.
_KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B-Instruct": (5120, 13824, 48, 40, 8, 152064, False),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model.

    Args:
        parameters: all of them, tied ones once.
        head: those of the LM head (vocabulary x hidden size), tied or not.
        tied: whether the head is the embedding.
        hidden, intermediate, layers, vocabulary: as in the configuration.
        kv_width: numbers a layer caches for a token, keys and values together.
        adapter: trainable parameters of the LoRA adapter; 0 without one.
    """

    parameters: int
    head: int
    tied: bool
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    kv_width: int
    adapter: int = 0

    @property
    def multiplied(self) -> int:
        """Parameters that take part in a token's matrix products: all but the input embedding."""
        return self.parameters - (0 if self.tied else self.head)


def read_shape(model: str, revision: str | None = None, lora: dict[str, Any] | None = None) -> tuple[ModelShape, str]:
    """Return a model's shape and where it is from, without its weights. `lora`: arguments of peft's `LoraConfig`.

    Raises `ValueError` if the configuration cannot be read, or the adapter does not fit the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config, source = _read_config(model, revision)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    shape = {
        "parameters": sum(p.numel() for p in module.parameters()),
        "head": text.vocab_size * text.hidden_size,
        "tied": bool(text.tie_word_embeddings),
        "hidden": text.hidden_size,
        "intermediate": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "layers": text.num_hidden_layers,
        "vocabulary": text.vocab_size,
        "kv_width": 2 * kv_heads * head_dim,
    }
    return ModelShape(**shape, adapter=0 if lora is None else _count_adapter(module, lora)), source


def _read_config(model: str, revision: str | None) -> tuple[Any, str]:
    from transformers import AutoConfig, Qwen2Config

    if model not in _KNOWN or Path(model).is_dir():
        try:
            return AutoConfig.from_pretrained(model, revision=revision), "its config.json"
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"model_name_or_path is {model!r}, whose config.json cannot be read: {first}") from error
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = _KNOWN[model]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    return config, "the table of g2po_trl.estimate.shape"


def _count_adapter(module: Any, lora: dict[str, Any]) -> int:
    from peft import LoraConfig, get_peft_model

    targets = lora.get("target_modules")
    if isinstance(targets, Sequence) and not isinstance(targets, str) and len(targets) == 1:
        lora = {**lora, "target_modules": targets[0] if targets[0] == "all-linear" else list(targets)}
    adapted = get_peft_model(module, LoraConfig(task_type="CAUSAL_LM", **lora))
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)
