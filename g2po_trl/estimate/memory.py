"""Memory of one GPU by part, from the model's shape and the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..utils.adapters import on_language_part
from ..utils.errors import G2POError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
VLLM_WORK_SPACE = 2e9  # CUDA graphs and activations, about what vLLM reports for models of this size
_QUANTIZED = {"4bit": 0.56, "8bit": 1.06}  # bytes a parameter, with the scales


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model, by the names of its configuration."""

    parameters: int  # tied ones once
    head: int  # parameters of the LM head (vocabulary x hidden size), tied or not
    tied: bool  # whether the head is the embedding
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    kv_width: int  # numbers that a layer caches for a token, keys and values together
    adapter: int = 0  # trainable parameters of the LoRA adapter
    dtype: str = "float32"  # of the checkpoint's weights, if its configuration names it

    @property
    def multiplied(self) -> int:
        """Parameters that take part in a token's matrix products: all but the input embedding."""
        return self.parameters - (0 if self.tied else self.head)


def read_shape(model: str, revision: str | None = None, lora: dict[str, Any] | None = None) -> ModelShape:
    """Return a model's shape, without its weights. `lora`: arguments of peft's `LoraConfig`.

    Raises `G2POError` if the configuration cannot be read.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
        own = getattr(transformers, (config.architectures or [""])[0], None)  # as it is trained, e.g. with its vision
        with torch.device("meta"):
            module = own(config) if own else AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        heads = text.num_attention_heads
    except (OSError, ValueError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        message = f"model_name_or_path is {model!r}, whose shape cannot be read from its config.json: {first}"
        raise G2POError(message, "model_name_or_path", model) from error
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=sum(p.numel() for p in module.parameters()),
        head=text.vocab_size * text.hidden_size,
        tied=bool(getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False))),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        kv_width=2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        adapter=0 if lora is None else _trained(module, lora),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
    )


def _trained(module: Any, lora: dict[str, Any]) -> int:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", **lora)
    lora.target_modules = "all-linear" if lora.target_modules == {"all-linear"} else lora.target_modules
    adapted = get_peft_model(module, on_language_part(lora, module))
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Training:
    """Settings of a configuration that determine its memory."""

    dtype: str = "float32"  # of the trained model's weights
    quantized: str | None = None  # "4bit" or "8bit"
    reference: bool = True  # whether a KL term needs one; with an adapter it is the model without it
    critic: bool = False  # of PPO: of the same shape, with its own optimizer
    autocast: bool = False  # arithmetic in 16 bits whatever the weights are in
    checkpointing: bool = True
    micro_batch_tokens: int = 16384
    sharded: bool = False  # weights, gradients and optimizer over the processes (FSDP2, ZeRO-3)
    processes: int = 1  # one per GPU
    vllm_share: float = 0.0  # `vllm_gpu_memory_utilization` of a colocated vLLM
    vllm_gpus: int = 1  # that share one copy of vLLM's model


class Part(NamedTuple):
    """A part of a GPU's memory in bytes, and its content."""

    name: str
    size: float
    note: str = ""


def memory_parts(shape: ModelShape, training: Training, gpu_memory: float) -> list[Part]:
    """Return the parts of the memory of the GPU that uses most.

    Weights, gradients and Adam's two moments have the weights' type; an adapter's are float32. A layer's activations
    are estimated as 12 hidden and 4.5 intermediate widths per token in 2 bytes, their gradients as 4 and 3. Logits
    need almost nothing: TRL's fused LM head computes them for a few hundred tokens at a time.
    """
    spread = training.processes if training.sharded else 1
    stored = shape.parameters * _QUANTIZED.get(training.quantized or "", BYTES[training.dtype]) / spread
    if shape.adapter:
        parts = [Part("weights", stored, f"{training.quantized or training.dtype}, frozen")]
        parts.append(Part("adapter", 16 * shape.adapter / spread, "float32, with gradient and Adam"))
    else:
        copies = {"weights": 1, "reference": int(training.reference), "gradients": 1, "Adam": 2}
        parts = [Part(name, number * stored, training.dtype) for name, number in copies.items() if number]
    if training.critic:
        parts.append(Part("critic", 16 * shape.parameters, "float32 weights, gradients, Adam"))
    if spread > 1:
        layer = (shape.multiplied - shape.head) / shape.layers
        parts.append(Part("gathered", 2 * (2 * layer + 2 * shape.head), "two layers and the LM head, bfloat16"))
    parts.append(_activations(shape, training))
    if training.vllm_share:
        parts.append(Part("vLLM", training.vllm_share * gpu_memory, "see below"))
    return parts


def _activations(shape: ModelShape, training: Training) -> Part:
    tokens = training.micro_batch_tokens
    layer = 2.0 * tokens * (12 * shape.hidden + 4.5 * shape.intermediate)
    head = 0.0 if shape.adapter else 6.0 * shape.head  # its gradient, in 16 bits and added up in float32
    note = f"{tokens:,} tokens a micro-batch"
    if not training.checkpointing:
        is_cast = training.autocast and training.dtype == "float32"
        casts = 2.0 * shape.multiplied * is_cast  # weights, kept until the backward pass has used them
        return Part("update", shape.layers * layer + casts + head, f"{note}, activations of all layers")
    inputs = 2.0 * tokens * shape.hidden * shape.layers
    layer += 2.0 * tokens * (4 * shape.hidden + 3 * shape.intermediate)  # and gradients of its activations
    sizes = f"layer inputs {inputs / 1e9:.1f}, one layer {layer / 1e9:.1f}, LM head {head / 1e9:.1f}"
    return Part("update", inputs + layer + head, f"{note}: {sizes}")


class Cache(NamedTuple):
    """Bytes of vLLM's weights, tokens that its cache holds, and tokens that all episodes together can need."""

    weights: float
    tokens: int
    needed: int


def vllm_cache(shape: ModelShape, training: Training, gpu_memory: float, episodes: int, longest: int) -> Cache:
    """Return vLLM's cache on a GPU of `gpu_memory` bytes, if `episodes` episodes of each GPU run at once.

    `vllm_gpus` share the model, in bfloat16, and their cache. `longest`: tokens of a prompt with its completion.
    """
    weights = 2.0 * (shape.parameters + shape.adapter) / training.vllm_gpus
    room = (training.vllm_share * gpu_memory - weights - VLLM_WORK_SPACE) * training.vllm_gpus
    tokens = max(0, int(room / (2 * shape.layers * shape.kv_width)))
    return Cache(weights, tokens, episodes * training.vllm_gpus * longest)
