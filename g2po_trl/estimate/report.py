"""The text of an estimate."""

from __future__ import annotations

from .measured import MeasuredRun
from .memory import Cache, Part, memory_parts, vllm_cache
from .plan import Episodes, Plan
from .seconds import Gpu, model_seconds
from .shape import ModelShape

_ANY_MEMORY = 80e9  # of a GPU that is not named; decides vLLM's share alone


def format_plan(plan: Plan, episodes: Episodes, gpu: Gpu | None, price: float | None) -> str:
    """Return memory, tokens and seconds of a run as text; `gpu=None`: no seconds; `price`: of a GPU an hour.

    Raises `ValueError` if the model's configuration cannot be read.
    """
    shape, source = plan.shape()
    lines = [_model_line(plan, shape, source), "", *_memory_lines(plan, shape, gpu)]
    work = plan.work(episodes)
    lines += ["", f"An iteration: {work.episodes} episodes of {episodes.turns:.0f} turns ({episodes.source})"]
    lines += [
        f"  {work.steps:,.0f} step samples of {episodes.prompt_tokens:.0f} + {episodes.completion_tokens:.0f} tokens: "
        f"{_count(work.steps * episodes.prompt_tokens)} of prompts, "
        f"{_count(work.steps * episodes.completion_tokens)} of completions; "
        f"{_count(work.positions)} positions in a pass of the update"
    ]
    evaluated = plan.evaluation_episodes
    played = f"{plan.evaluations} of {'unknown size' if evaluated is None else f'{evaluated} episodes'}"
    lines += [f"The run: {plan.iterations} iterations, evaluations: {played}"]
    if gpu is None:
        return "\n".join([*lines, "", "--gpu NAME adds seconds; --measure 2 times two iterations on this machine."])
    checkpointing, vllm = bool(plan["gradient_checkpointing"]), plan.generates_by_vllm
    seconds = model_seconds(shape, gpu, work, plan.processes, checkpointing, vllm)
    an_iteration = sum(seconds.values())
    evaluations = plan.evaluations * (evaluated or 0) / work.episodes * seconds["generation"]
    total = plan.iterations * an_iteration + evaluations
    lines += ["", f"Seconds of the model on {plan.processes} x {gpu.name}, computed, confirmed on no GPU but an H200:"]
    lines += [f"  {name:18} {value:8.1f} s" for name, value in seconds.items()]
    lines += [f"  {'an iteration':18} {an_iteration:8.1f} s", *_total(total, plan.processes, price, "GPU hours")]
    played = "" if evaluated else "evaluations, "
    lines += [f"  without {played}environments, the optimizer step and saving; --measure 2 times the whole"]
    return "\n".join(lines)


def format_measured(plan: Plan, run: MeasuredRun, price: float | None) -> str:
    """Return what a run takes as text, from iterations that were played here."""
    lines = [f"Measured here, median of {run.iterations} iterations after the first:"]
    lines += [f"  {name.removeprefix('time/'):18} {value:8.3f} s" for name, value in run.seconds.items()]
    lines += [f"  {'an iteration':18} {run.iteration:8.3f} s"]
    lines += [f"  {'an evaluation':18} {run.evaluation:8.3f} s"]
    lines += [f"  {'start and end':18} {run.rest:8.3f} s"]
    lines += [f"  {'largest process':18} {run.peak_memory / 1e9:8.3f} GB of memory"]
    total = plan.iterations * run.iteration + plan.evaluations * run.evaluation + run.rest
    lines += [f"The run: {plan.iterations} iterations, {plan.evaluations} evaluations, if later ones are like these"]
    return "\n".join([*lines, *_total(total, plan.processes, price)])


def _model_line(plan: Plan, shape: ModelShape, source: str) -> str:
    trained = f"{_count(shape.adapter)} trained (LoRA)" if shape.adapter else "all trained"
    return f"{plan.model}: {_count(shape.parameters)} parameters, {trained} (by {source})"


def _memory_lines(plan: Plan, shape: ModelShape, gpu: Gpu | None) -> list[str]:
    memory = _ANY_MEMORY if gpu is None else gpu.memory
    training = plan.training()
    parts = memory_parts(shape, training, memory)
    total = sum(part.size for part in parts)
    several = plan.processes > 1
    lines = [(f"Memory of each of {plan.processes} GPUs" if several else "Memory of the GPU") if gpu else "Memory"]
    lines += [_part_line(part) for part in parts]
    if gpu is None:
        lines += [f"  {'sum':12} {total / 1e9:7.2f} GB"]
    else:
        verdict = "fits" if total < 0.95 * memory else "does not fit" if total > memory else "hardly fits"
        lines += [f"  {'sum':12} {total / 1e9:7.2f} of {memory / 1e9:.0f} GB: {verdict}{_remedy(plan, total, memory)}"]
    if training.vllm_share:
        per_process = -(-plan.episodes // plan.processes)
        lines += [_cache_line(vllm_cache(shape, training, memory, per_process, plan.longest_sample))]
    return lines


def _remedy(plan: Plan, total: float, memory: float) -> str:
    if total < 0.95 * memory:
        return ""
    names = ["max_tokens_per_micro_batch", *(["vllm_gpu_memory_utilization"] if plan["use_vllm"] else [])]
    text = f" (lower {' or '.join(names)}"
    return text + ("" if plan["use_peft"] else "; or use_peft, or fsdp2 over more GPUs") + ")"


def _part_line(part: Part) -> str:
    return f"  {part.name:12} {part.size / 1e9:7.2f} GB  {part.note}".rstrip()


def _cache_line(cache: Cache) -> str:
    if not cache.tokens:
        return f"vLLM: weights {cache.weights / 1e9:.1f} GB leave no room for its cache: raise its share"
    enough = "enough" if cache.tokens >= cache.needed else "not enough for all at once, so that some wait"
    return (
        f"vLLM: weights {cache.weights / 1e9:.1f} GB; its cache holds {cache.tokens:,} tokens, "
        f"and the episodes need at most {cache.needed:,}: {enough}"
    )


def _total(seconds: float, processes: int, price: float | None, unit: str = "process hours") -> list[str]:
    hours = seconds / 3600
    length = f"{seconds / 60:.1f} min" if seconds < 5400 else f"{hours:.1f} h"
    cost = "" if price is None else f", {hours * processes * price:.2f} at {price:g} an hour"
    return [f"  {'the run':18} {length:>10}, {hours * processes:.2f} {unit}{cost}"]


def _count(number: float) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
