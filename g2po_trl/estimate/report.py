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
    steps = plan.episodes * episodes.turns
    prompts, completions = steps * episodes.prompt_tokens, steps * episodes.completion_tokens
    forwarded = (prompts + completions) * (episodes.forwarded if plan["token_layout"] == "shared" else 1.0)
    return "\n".join(
        [
            f"{plan.model}: {_count(shape.parameters)} parameters, {trained}",
            "",
            *_memory_lines(plan, shape, gpu_memory),
            "",
            f"An iteration: {plan.episodes} episodes of {episodes.turns:.0f} turns ({episodes.source})",
            f"  {steps:,.0f} step samples of {episodes.prompt_tokens:.0f} + {episodes.completion_tokens:.0f} tokens: "
            f"{_count(prompts)} of prompts, {_count(completions)} of completions; "
            f"{_count(forwarded)} positions in a pass of the update",
            f"The run: {plan.iterations} iterations",
        ]
    )


def _memory_lines(plan: Plan, shape: ModelShape, gpu_memory: float | None) -> list[str]:
    memory, training = gpu_memory or _ANY_MEMORY, plan.training(shape.dtype)
    parts = memory_parts(shape, training, memory)
    total = sum(part.size for part in parts)
    lines = [f"Memory of each of {plan.processes} GPUs" if plan.processes > 1 else "Memory of the GPU"]
    lines += [f"  {part.name:12} {part.size / 1e9:7.2f} GB  {part.note}".rstrip() for part in parts]
    names = ["max_tokens_per_micro_batch", *(["vllm_gpu_memory_utilization"] if training.vllm_share else [])]
    names += [] if plan["use_peft"] else ["use_peft", "fsdp2 over more GPUs"]
    short = f"{'does not fit' if total > memory else 'hardly fits'} (remedies: {', '.join(names)})"
    verdict = f" of {memory / 1e9:.0f} GB: {'fits' if total < 0.95 * memory else short}"
    lines.append(f"  {'sum':12} {total / 1e9:7.2f}{' GB' if gpu_memory is None else verdict}")
    if training.vllm_share:
        longest = (plan["max_prompt_length"] or 0) + plan["max_completion_length"]
        cache = vllm_cache(shape, training, memory, -(-plan.episodes // plan.processes), longest)
        enough = "enough" if cache.tokens >= cache.needed else "not enough for all at once, so that some wait"
        holds = f"its cache holds {cache.tokens:,} tokens, and the episodes need at most {cache.needed:,}: {enough}"
        lines.append(f"vLLM: weights {cache.weights / 1e9:.1f} GB; {holds}")
    return lines


def _count(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
