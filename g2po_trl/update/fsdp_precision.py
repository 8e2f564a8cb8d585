"""What a sharded model is told before it is prepared: in which precision its parts hand on what they computed."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from accelerate.utils import FullyShardedDataParallelPlugin

logger = logging.getLogger(__name__)
_HALF = (torch.bfloat16, torch.float16)


def keep_outputs_exact(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Take the rounding of outputs out of FSDP2's mixed precision, and reduce gradients in float32.

    Accelerate's policy for `bf16` casts what a sharded module returns to bfloat16, the whole model's log-probabilities
    with it: to 3 digits. Ratios of two policies a step apart and their KL are then rounding and nothing else. Without
    the cast each module hands on what it computed, as under DDP: layers bfloat16, the LM head float32. A policy of the
    user's is kept, but for the rounding of outputs.
    """
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is None or plugin.fsdp_version != 2 or policy is None or policy.output_dtype not in _HALF:
        return
    if policy.param_dtype == policy.reduce_dtype == policy.output_dtype:  # accelerate's own
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
    else:
        logger.warning(
            f"output_dtype of FSDP's mixed_precision_policy is {policy.output_dtype}: log-probabilities would be "
            "rounded to it, and the ratio and the KL with them. None is used, and the rest of the policy is kept."
        )
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)
