"""Contexts of a forward pass (evaluation mode, kernels of attention), and the precision of its outputs under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, is_peft_model

_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside, since dropout would change log-probabilities."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN attention in forward and backward passes; a context manager and a decorator.

    PyTorch prefers it on an H100, H200 or B200. With a mask its gradient is NaN at some row lengths (pytorch#196678),
    it builds a plan of up to a second for each new shape, of which an iteration has dozens, and on a B200 it generates
    wrong tokens for models with few key-value heads (pytorch#193893). Models with a sliding window create masks
    internally, so the arguments do not show whether a mask is used.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def keep_outputs_exact(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Keep outputs of FSDP2 modules in the precision they are computed in, and reduce gradients in float32.

    Accelerate's policy for `bf16` casts the outputs of sharded modules to bfloat16, and so log-probabilities to 3
    digits: ratios of two policies a step apart, and their KL, are then only rounding. Without the cast, outputs have
    the dtypes of DDP: bfloat16 of layers, float32 of the LM head. A policy set by the user keeps its other fields.
    """
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is None or plugin.fsdp_version != 2 or policy is None or policy.output_dtype not in _HALF:
        return
    if policy.param_dtype == policy.reduce_dtype == policy.output_dtype:  # accelerate's own
        policy = replace(policy, reduce_dtype=torch.float32)
    plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def precision_of(model: torch.nn.Module, accelerator: Accelerator) -> dict[str, str | None]:
    """Return dtype and autocast of `generate`, by torch's names, of a model without accelerate's wrappers."""
    base = model.get_base_model() if is_peft_model(model) else model
    # Autocast wraps the forward pass of the prepared model, and `generate` of an adapter calls that of its base.
    mixed = accelerator.native_amp and base is model
    autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision) if mixed else None
    return {"dtype": str(base.dtype).removeprefix("torch."), "autocast": autocast}
