"""Log-probabilities and update of Qwen2.5-1.5B with random weights, by layout and attention: part of `run.py`.

    python -m benchmarks.gpu.phases --findings FILE --seconds 150 [--turns 6] [--conversations] [--hybrid] [--shrink]

128 synthetic episodes (16 groups of 8; `work.synthetic_trajectories`) of `--turns` turns, with the settings of
recipes/alfworld/qwen2.5-1.5b.yaml: float32 weights, bfloat16 arithmetic, gradient checkpointing, 32,768 tokens a
micro-batch; with `--hybrid`, Qwen3.5-0.8B's shape. Each combination gets an equal part of the seconds that are left,
and measures as many micro-batches, from all over the batch, as it has time for. Tokens are those of the step samples,
whatever the layout makes of them, so tokens a second compare. One line of JSON for each, as it comes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from benchmarks import common
from benchmarks.gpu import trie
from benchmarks.gpu.jobs import commit, machine
from benchmarks.gpu.work import (
    RECIPES,
    RecordedTrainer,
    as_one_row,
    conversation_tokens,
    flash_attentions,
    hybrid_model,
    recipe_trainer,
    synthetic_conversations,
    synthetic_trajectories,
)
from benchmarks.speed.layouts import (
    add_log_probs,
    backward,
    count,
    different_tokens,
    random_model,
    trl_micro_batches,
)
from g2po_trl import StateGraph, Trajectory, g2po
from g2po_trl.update.batch import StepBatch
from g2po_trl.update.forks import fork_cost

TINY = (64, 128, 2, 4, 2, 2048)


def combinations(hybrid: bool = False, conversations: bool = False) -> list[tuple[str, str, bool]]:
    """Attention, layout, gradient checkpointing: the most valuable first."""
    if hybrid:  # with checkpointing, layers keep no cache to fork
        return [("sdpa", "forked", False), ("sdpa", "padded", True), ("sdpa", "trl", True)]
    flash = [(name, "shared", True) for name in flash_attentions()]
    if conversations:  # `rows`: each conversation one row, padded as by TRL's trainer
        return [*(("sdpa", of, True) for of in ("shared", "trie", "trl", "rows")), *flash]
    return [
        ("sdpa", "shared", True),
        ("sdpa", "padded", True),
        *flash,
        ("sdpa", "trl", True),
        ("sdpa", "shared", False),
    ]


def tokens_of(micro_batch: dict[str, Any]) -> int:
    """Of its step samples, or of its conversations."""
    if "conversation_tokens" in micro_batch:
        return micro_batch["conversation_tokens"]
    return int(micro_batch["prompt_mask"].sum() + micro_batch["completion_mask"].sum())


def spread(number: int) -> list[int]:
    """0 … number - 1 in an order whose every beginning comes from all over."""
    order = [0]
    step = 1 << max(number - 1, 1).bit_length()
    while step > 1:
        order += range(step // 2, number, step)
        step //= 2
    return [place for place in dict.fromkeys(order) if place < number]


def waiting(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(
    run: Callable[[dict[str, Any]], None], micro_batches: list, seconds: float, device, factor: float = 1.0
) -> dict[str, Any]:
    """Tokens a second over as many micro-batches as there is time for, and at least one.

    Args:
        factor: tokens of step samples for each token of the micro-batches.
    """
    started, tokens, done = time.perf_counter(), 0, []
    for place in spread(len(micro_batches)):
        run(micro_batches[place])
        waiting(device)
        tokens += tokens_of(micro_batches[place])
        done.append(place)
        if time.perf_counter() - started > seconds:
            break
    took = time.perf_counter() - started
    return {
        "seconds": round(took, 3),
        "micro_batches": len(done),
        "tokens_per_second": round(factor * tokens / took),
        "places": done,
    }


def cut(trainer: RecordedTrainer, batch: StepBatch, layout: str, made: list[Trajectory]) -> list[dict[str, Any]]:
    if layout == "trie":
        return trie.micro_batches(made, trainer.args.max_tokens_per_micro_batch)
    if layout == "rows":
        rows = StepBatch.from_trajectories([as_one_row(one) for one in made], [one.reward / 10 - 0.5 for one in made])
        return trl_micro_batches(trainer, rows, trainer.args.max_tokens_per_micro_batch)
    if layout == "trl":
        return trl_micro_batches(trainer, batch, trainer.args.max_tokens_per_micro_batch)
    of = trainer.update.layout
    of.kind = layout
    of.fork_cost = fork_cost(of.language_model(trainer.model), trainer.accelerator.device.type)
    mini_batches, _ = trainer.update.split([batch])
    return [micro_batch for part in mini_batches for micro_batch in part]


def measure(
    trainer: RecordedTrainer,
    batch: StepBatch,
    attention: str,
    layout: str,
    seconds: float,
    made: list[Trajectory],
) -> dict[str, Any]:
    """One combination: the first pass (with what it compiles), log-probabilities, update, memory."""
    device, model = trainer.accelerator.device, trainer.accelerator.unwrap_model(trainer.model)
    model.set_attn_implementation(trie.register() if layout == "trie" else attention)
    micro_batches, factor = cut(trainer, batch, layout, made), 1.0
    trainer.update.log_probs.needs_old_log_probs = True
    if layout in ("trie", "rows"):
        of_steps = int(batch.lengths().sum())
        factor = of_steps / sum(len(conversation_tokens(one)[0]) for one in made)
    trainer.model.train()

    def of_trie(micro_batch: dict[str, Any]) -> torch.Tensor:
        with trainer.accelerator.autocast():
            return trie.log_probs(model, micro_batch, device)

    def score(micro_batch: dict[str, Any]) -> None:
        if layout == "trie":
            with torch.no_grad():
                of_trie(micro_batch)
            return
        add_log_probs(trainer, [micro_batch])

    def update(micro_batch: dict[str, Any]) -> None:
        if layout == "trie":
            trie.loss(of_trie(micro_batch), micro_batch).backward()
            return
        if "old_per_token_logps" not in micro_batch:  # there was no time for it: about what random weights say
            shape, chance = micro_batch["completion_ids"].shape, -math.log(model.config.vocab_size)
            micro_batch["old_per_token_logps"] = torch.full(shape, chance, device=device)
        backward(trainer, [micro_batch])

    started = time.perf_counter()
    trainer.model.zero_grad()
    score(micro_batches[0])
    update(micro_batches[0])
    waiting(device)
    first = time.perf_counter() - started
    left = max(0.0, seconds - first)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {"logps": timed(score, micro_batches, left / 4, device, factor)}
    found["update"] = timed(update, micro_batches, left * 3 / 4, device, factor)
    if device.type == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    repeated = 4 if trainer.args.gradient_checkpointing else 3
    for name, passes in (("logps", 1), ("update", repeated)):
        of_these = [micro_batches[place] for place in found[name].pop("places")]
        if layout == "trie" or "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
            continue
        tflop = passes * count(of_these, model)["forward_gflop"] / 1e3
        found[name]["tflop_per_second"] = round(tflop / max(found[name]["seconds"], 1e-3), 3)
    return found | {
        "first_seconds": round(first, 2),
        "positions": sum(len(row["input_ids"]) for row in micro_batches)
        if layout == "trie"
        else count(micro_batches, model)["positions"],
        "tokens": round(factor * sum(map(tokens_of, micro_batches))),
        "of_micro_batches": len(micro_batches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--findings", type=Path, required=True, help="file to which a line of JSON is added for each")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--turns", type=int, help="of each episode; the paper's have up to 50; default: 6 or 12")
    parser.add_argument("--conversations", action="store_true", help="prompts hold all that went before")
    parser.add_argument("--hybrid", action="store_true", help="Qwen3.5-0.8B's shape, with what kernels there are")
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument(
        "--combinations",
        nargs="+",
        metavar="ATTENTION:LAYOUT[:plain]",
        help="plain: without gradient checkpointing; default: see `combinations`",
    )
    parser.add_argument("--shrink", action="store_true", help="a tiny model, short prompts, two groups")
    args = parser.parse_args()
    deadline, on_gpu = time.perf_counter() + args.seconds, torch.cuda.is_available()

    def say(**finding: Any) -> None:
        with args.findings.open("a") as file:
            file.write(json.dumps(finding) + "\n")
        print(json.dumps(finding), flush=True)

    groups, shape, options = 16, "1.5b", {"max_tokens_per_micro_batch": args.tokens}
    RecordedTrainer.turns = args.turns or (12 if args.conversations else 6)
    lengths = (700, 60, 0, 150) if args.conversations else RecordedTrainer.lengths
    if args.shrink:
        groups, shape, options = 2, TINY, {"max_tokens_per_micro_batch": 512}
        RecordedTrainer.turns, RecordedTrainer.vocabulary = min(RecordedTrainer.turns, 3), 2000
        lengths = RecordedTrainer.lengths = (40, 4, 40, 12)
    make = synthetic_conversations if args.conversations else synthetic_trajectories
    made = make(groups, RecordedTrainer.turns, RecordedTrainer.vocabulary, lengths)
    advantages = g2po(StateGraph.from_groups([made[i : i + 8] for i in range(0, len(made), 8)]))
    batch = StepBatch.from_trajectories(made, advantages)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        # The reference would be read from a disk: its pass costs what the policy's own does.
        model = hybrid_model(tiny=args.shrink) if args.hybrid else random_model(shape)
        trainer = recipe_trainer(
            RECIPES / "qwen2.5-1.5b.yaml", Path(folder), model, beta=0.0, use_cpu=not on_gpu, **options
        )
        trainer.current_gradient_accumulation_steps = 1  # what `train` would set, as gradient checkpointing
        say(about="machine", command=common.command(), commit=commit(), **machine({}))
        say(
            about="batch",
            model=model.config.model_type,
            kernels=[name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)],
            parameters=sum(p.numel() for p in trainer.model.parameters()),
            episodes=len(made),
            turns=RecordedTrainer.turns,
            step_samples=len(batch),
            conversations=args.conversations,
            tokens=int(batch.lengths().sum()),
            unique_tokens=different_tokens(batch.sequences()),
            mean_prompt=round(float(np.mean([len(ids) for ids in batch.prompt_ids])), 1),
            mean_completion=round(float(np.mean([len(ids) for ids in batch.completion_ids])), 1),
            max_tokens_per_micro_batch=trainer.args.max_tokens_per_micro_batch,
            seconds_to_load=round(time.perf_counter() - started, 1),
        )
        todo = combinations(args.hybrid, args.conversations)
        if args.combinations:
            todo = [(*name.split(":")[:2], not name.endswith(":plain")) for name in args.combinations]
        for number, (attention, layout, checkpointing) in enumerate(todo):
            row = {"attention": attention, "layout": layout, "gradient_checkpointing": checkpointing}
            left = deadline - time.perf_counter()
            if left < 5 and not args.shrink:
                say(**row, error="no time left")
                continue
            try:
                set_checkpointing(trainer, checkpointing)
                row |= measure(trainer, batch, attention, layout, min(25.0, left / (len(todo) - number)), made)
            except Exception as error:  # out of memory, or an attention that is not there: the others go on
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            trainer.model.zero_grad()
            if on_gpu:
                torch.cuda.empty_cache()
            say(**row)
        trainer.close()


def set_checkpointing(trainer: RecordedTrainer, on: bool) -> None:
    """Switch it, whatever the arguments say: only `train` acts on them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainer.args.gradient_checkpointing = on
    if on:
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    else:
        model.gradient_checkpointing_disable()


if __name__ == "__main__":
    main()
