"""Seconds of an iteration's parts on a GPU, from FLOPs and bytes.

Generation reads the weights once for a pass over all running episodes; log-probabilities and the update pass every
position that is not shared through the model. Environments, the optimizer step and weights on their way to vLLM are
not included. The rates are fitted to one H200 (benchmarks/results/gpu): Qwen2.5-1.5B in large micro-batches, and
SmolLM2-135M in small ones, also with vLLM. Other GPUs and several of them have not been timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .shape import ModelShape

UTILISATION = 0.33  # of peak FLOPs in passes over full micro-batches: 0.28 to 0.37 measured
READ_SHARE = 0.6  # of peak bandwidth in decoding
PASS_OVERHEAD = 4e-3  # seconds of vLLM's decoding pass besides reading
LAYER_OVERHEAD = 1.6e-3  # the same of `generate`'s, for each layer: 1.2e-3 (SmolLM2, four runs on a GPU) to 2.9e-3


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: dense bfloat16 FLOPs and bytes a second, and bytes of memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float


# NVIDIA's data sheets.
GPUS = {
    "h200": Gpu("H200", 989e12, 4.8e12, 141e9),
    "h100": Gpu("H100 SXM", 989e12, 3.35e12, 80e9),
    "a100-80gb": Gpu("A100 80 GB", 312e12, 2.04e12, 80e9),
    "a100-40gb": Gpu("A100 40 GB", 312e12, 1.56e12, 40e9),
    "l40s": Gpu("L40S", 362e12, 0.864e12, 48e9),
    "a10g": Gpu("A10G", 70e12, 0.6e12, 24e9),
    "l4": Gpu("L4", 121e12, 0.3e12, 24e9),
    "rtx4090": Gpu("RTX 4090", 165e12, 1.01e12, 24e9),
}


@dataclass(frozen=True)
class Work:
    """One iteration.

    Args:
        episodes: of all processes.
        turns: mean of an episode.
        longest_turns: of the longest episode.
        prompt_tokens, completion_tokens: mean of a step.
        longest_completion: tokens of a turn of the longest episode. Where all wait for each other (`generate`), of the
            longest completion.
        forwarded: fraction of a step sample's positions that the update processes; the others are shared.
        passes: without gradients, over all positions: of the reference, and of old log-probabilities.
        updates: passes with gradients, `num_iterations`.
        micro_batch_tokens: positions of a micro-batch. A layer takes `LAYER_OVERHEAD` however few there are.
        calls: of `generate` in a turn.
    """

    episodes: int
    turns: float
    longest_turns: float
    prompt_tokens: float
    completion_tokens: float
    longest_completion: float
    forwarded: float = 0.65
    passes: int = 2
    updates: int = 1
    micro_batch_tokens: float = math.inf
    calls: int = 1

    @property
    def steps(self) -> float:
        return self.episodes * self.turns

    @property
    def positions(self) -> float:
        """Positions of one pass over the rollout."""
        return self.steps * (self.prompt_tokens + self.completion_tokens) * self.forwarded


def model_seconds(
    shape: ModelShape, gpu: Gpu, work: Work, processes: int = 1, checkpointing: bool = True, vllm: bool = True
) -> dict[str, float]:
    """Return seconds of the model by phase: `generation` (by vLLM or `generate`), `log-probabilities`, `update`."""
    compute, read = gpu.flops * UTILISATION, gpu.bandwidth * READ_SHARE
    own_steps, positions = work.steps / processes, work.positions / processes
    decoded = own_steps * work.completion_tokens
    body = 2.0 * (shape.multiplied - shape.head)
    cached = 2.0 * shape.layers * shape.kv_width * (work.prompt_tokens + work.completion_tokens / 2)
    passes = work.longest_turns * work.longest_completion * work.calls
    generation = own_steps * work.prompt_tokens * body / compute
    generation += decoded * ((body + 2.0 * shape.head) / compute + cached / read)
    overhead = PASS_OVERHEAD if vllm else LAYER_OVERHEAD * shape.layers
    generation += passes * (2.0 * shape.multiplied / read + overhead)
    scored = work.completion_tokens / (work.prompt_tokens + work.completion_tokens) / work.forwarded
    forward = (body + 2.0 * shape.head * scored) / compute
    backward = 3.0 if checkpointing else 2.0  # a forward pass once more, and two for the backward pass
    if shape.adapter:
        backward -= 1.0  # no gradients of frozen weights
    launched = positions / work.micro_batch_tokens * LAYER_OVERHEAD * shape.layers  # whatever the GPU computes in them
    return {
        "generation": generation,
        "log-probabilities": work.passes * max(positions * forward, launched),
        "update": work.updates * max(positions * forward * (1.0 + backward), 2 * launched),
    }
