"""The text of an estimate."""

from __future__ import annotations

from .memory import ModelShape, memory_parts, vllm_cache
from .plan import Episodes, Plan

_ANY_MEMORY = 80e9  # of a GPU that is not named; decides vLLM's share alone


def format_plan(plan: Plan, episodes: Episodes, gpu_memory: float | None) -> str:
    """Return memory and tokens of a run as text. `gpu_memory`: bytes of a GPU; `None`: without a verdict.

    Raises `G2POError` if the model's configuration cannot be read.
    """
    shape = plan.shape()
    trained = f"{_count(shape.adapter)} trained (LoRA)" if shape.adapter else "all trained"
    lines = [f"{plan.model}: {_count(shape.parameters)} parameters, {trained}", ""]
    lines += _memory_lines(plan, shape, gpu_memory)
    steps = plan.episodes * episodes.turns
    prompts, completions = steps * episodes.prompt_tokens, steps * episodes.completion_tokens
    forwarded = episodes.forwarded if plan["token_layout"] == "shared" else 1.0
    return "\n".join(
        [
            *lines,
            "",
            f"An iteration: {plan.episodes} episodes of {episodes.turns:.0f} turns ({episodes.source})",
            f"  {steps:,.0f} step samples of {episodes.prompt_tokens:.0f} + {episodes.completion_tokens:.0f} tokens: "
            f"{_count(prompts)} of prompts, {_count(completions)} of completions; "
            f"{_count((prompts + completions) * forwarded)} positions in a pass of the update",
            f"The run: {plan.iterations} iterations",
        ]
    )


def _memory_lines(plan: Plan, shape: ModelShape, gpu_memory: float | None) -> list[str]:
    memory, training = gpu_memory or _ANY_MEMORY, plan.training(shape.dtype)
    parts = memory_parts(shape, training, memory)
    total = sum(part.size for part in parts)
    lines = [f"Memory of each of {plan.processes} GPUs" if plan.processes > 1 else "Memory of the GPU"]
    lines += [f"  {part.name:12} {part.size / 1e9:7.2f} GB  {part.note}".rstrip() for part in parts]
    verdict = " GB"
    if gpu_memory is not None:
        fits = "fits" if total < 0.95 * memory else "does not fit" if total > memory else "hardly fits"
        names = ["max_tokens_per_micro_batch", *(["vllm_gpu_memory_utilization"] if training.vllm_share else [])]
        names += [] if plan["use_peft"] else ["use_peft", "fsdp2 over more GPUs"]
        remedy = "" if fits == "fits" else f" (remedies: {', '.join(names)})"
        verdict = f" of {memory / 1e9:.0f} GB: {fits}{remedy}"
    lines.append(f"  {'sum':12} {total / 1e9:7.2f}{verdict}")
    if training.vllm_share:
        cache = vllm_cache(shape, training, memory, -(-plan.episodes // plan.processes), plan.longest_sample)
        enough = "enough" if cache.tokens >= cache.needed else "not enough for all at once, so that some wait"
        lines.append(
            f"vLLM: weights {cache.weights / 1e9:.1f} GB; its cache holds {cache.tokens:,} tokens, and the episodes "
            f"need at most {cache.needed:,}: {enough}"
        )
    return lines


def _count(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
