"""Precision of the outputs of FSDP2 modules."""

from __future__ import annotations

from dataclasses import replace

import torch
from accelerate.utils import FullyShardedDataParallelPlugin

_HALF = (torch.bfloat16, torch.float16)


def keep_outputs_exact(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Keep outputs of FSDP2 modules in the precision they are computed in, and reduce gradients in float32.

    Accelerate's policy for `bf16` casts the outputs of sharded modules to bfloat16, and so log-probabilities to 3
    digits: ratios of two policies a step apart, and their KL, are then only rounding. Without the cast, outputs are
    those of DDP: bfloat16 of layers, float32 of the LM head. A policy set by the user keeps its other fields.
    """
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is None or plugin.fsdp_version != 2 or policy is None or policy.output_dtype not in _HALF:
        return
    if policy.param_dtype == policy.reduce_dtype == policy.output_dtype:  # accelerate's own
        policy = replace(policy, reduce_dtype=torch.float32)
    plugin.mixed_precision_policy = replace(policy, output_dtype=None)
