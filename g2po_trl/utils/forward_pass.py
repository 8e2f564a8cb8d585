"""Modes of a forward pass, kernels of attention, precision of outputs under FSDP2, and the longest sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PretrainedConfig


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside, since dropout would change log-probabilities."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def without_randomness(model: torch.nn.Module) -> None:
    """Switch off dropout, noise of routers and batch statistics of a model that trains: it is the policy that played.

    Modules read them from `training`. The model itself keeps it, and modules with gradient checkpointing, which
    recompute only in training mode. `model.train()` and `model.eval()` undo this.
    """
    for module in model.modules():
        module.training = module is model or getattr(module, "gradient_checkpointing", False)


def context_length(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model's positions hold, scaled ones included; `None`: it has no limit."""
    config = config.get_text_config()
    longest, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, Mapping) and part.get("factor")]
    parts = [part for part in parts if part.get("rope_type") not in ("linear", "llama3")]  # the number is scaled
    scaled = (int((part.get("original_max_position_embeddings") or longest) * part["factor"]) for part in parts)
    return None if longest is None else max([longest, *scaled])


def rotary_scales(config: PretrainedConfig, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each sequence length the rotary scales, of each kind of layers, that the longest row decides."""
    limit, rope = getattr(config, "max_position_embeddings", 0), getattr(config, "rope_parameters", None) or {}
    scales = []
    for part in (part for part in (rope, *rope.values()) if isinstance(part, dict)):
        if part.get("rope_type") == "longrope":
            short = part.get("original_max_position_embeddings") or limit
            scales.append([int(length > short) for length in lengths])
        elif part.get("rope_type") == "dynamic":
            scales.append([max(length, limit) for length in lengths])
    return list(zip(*scales)) if scales else [()] * len(lengths)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN attention in forward and backward passes; a context manager and a decorator.

    On an H100, H200 or B200, its gradient with a mask, which models with a sliding window make themselves, is NaN at
    some row lengths (pytorch#196678), it plans for up to a second for each new shape, and on a B200 it generates wrong
    tokens for models with few key-value heads (pytorch#193893).
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def keep_outputs_exact(accelerator: Accelerator) -> None:
    """Keep outputs of FSDP2 modules in the precision they are computed in, and reduce gradients in float32.

    Accelerate's policy for `bf16` casts the outputs of sharded modules, and so log-probabilities, to 3 digits: ratios
    of two policies a step apart, and their KL, are then only rounding. A user's policy keeps its other fields.
    """
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy if accelerator.is_fsdp2 else None
    if policy is not None and policy.output_dtype in (torch.bfloat16, torch.float16):
        is_accelerates = policy.param_dtype == policy.reduce_dtype == policy.output_dtype
        reduced = torch.float32 if is_accelerates else policy.reduce_dtype
        accelerator.state.fsdp_plugin.mixed_precision_policy = replace(policy, reduce_dtype=reduced, output_dtype=None)


def precision_of(model: torch.nn.Module, accelerator: Accelerator) -> dict[str, str | None]:
    """Return dtype and autocast of `generate`, by torch's names, of a model without accelerate's wrappers."""
    base = model.get_base_model() if is_peft_model(model) else model
    # Autocast wraps the forward pass of the prepared model, and `generate` of an adapter calls that of its base.
    mixed = accelerator.native_amp and base is model
    autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision) if mixed else None
    return {"dtype": str(base.dtype).removeprefix("torch."), "autocast": autocast}
