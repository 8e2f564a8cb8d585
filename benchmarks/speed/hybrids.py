"""Layouts of models whose layers are not attention alone: exact or not, positions, seconds.

    python -m benchmarks.speed.hybrids --output benchmarks/results/hybrids [--samples benchmarks/results/positions]
        [--step_samples 112] [--max_tokens 2048] [--repetitions 2] [--models lfm2 …]

Every causal language model of transformers that cannot attend by branches is built tiny and at random, and scores
and trains the first step samples that `benchmarks.speed.positions` has recorded, about those of a group: windows of
two turns, and whole conversations. Layouts take turns in each repetition. Log-probabilities and gradients are compared
with those of each sample alone, in float32; in bfloat16, the mean distance of log-probabilities to the float32 ones is
given for each sample alone and for the layout.

Writes OUTPUT/results.json, and the table of it to OUTPUT/README.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from os import getloadavg
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

from benchmarks.common import ROOT, facts, interleaved, medians, write_results
from benchmarks.speed.positions import SAMPLES, part_of, recorded
from g2po_trl.update.attention import why_not_by_branches
from g2po_trl.update.balance import BatchingConfig, RowSummary
from g2po_trl.update.batch import StepBatch
from g2po_trl.update.forks import fork_cost, forked_passes
from g2po_trl.update.layout import weights_of_a_layer
from g2po_trl.update.policy.probe import why_not_forked
from g2po_trl.update.prefix_order import Ordering
from g2po_trl.update.tree import lay_out
from g2po_trl.utils.trl_compat import expose_body, fused_log_probs

sys.path.append(str(ROOT / "tests" / "helpers"))

from causal_models import MODEL_TYPES, tiny_model  # noqa: E402

LAYOUTS = ("padded", "forked")
VOCABULARY = 1024  # at least the tokens of the tiny model
COMPARED = 8  # step samples, spread over all
# `mamba_selective_scan` of transformers and its kernel take no initial state: one of several tokens starts at 0.
MAMBA_1 = ("falcon_mamba", "jamba", "mamba", "zamba")
TITLES = (
    "Model",
    "Samples",
    "Layout",
    "Positions",
    "CPU seconds",
    "Speed-up over padded",
    "Largest difference, nats",
    "Gradient, relative",
    "bf16, nats: alone, layout",
)


def micro_batches(batch: StepBatch, layout: str, max_tokens: int, cost: int = 8) -> list[dict[str, Any]]:
    """Return the rows of each forward pass, with `rows`, the step samples in them."""
    completions, made = list(map(len, batch.completion_ids)), []
    config = BatchingConfig(1, max_tokens, "dapo", 0, layout=layout, fork_cost=cost if layout == "forked" else None)
    rows, ordering = RowSummary.concatenate([batch.summary]), Ordering.from_sequences(batch.sequences())
    ((planned,), _) = config.plan(rows, ordering, np.random.default_rng(0))
    for part in planned:
        of, (own,) = lay_out(part.trees[0], batch.sequences(), completions, 0, config.row_multiple), part.rows
        mask = torch.arange(max(completions)) < torch.tensor([completions[row] for row in own])[:, None]
        made.append({**of, "rows": own, "mask": mask})
    return made


def log_probs(model: torch.nn.Module, part: dict[str, Any]) -> torch.Tensor:
    """Return log-probabilities of a micro-batch's step samples, (rows, C)."""
    inputs = {"input_ids": part["row_ids"], "attention_mask": None}
    with forked_passes(model.base_model, part.get("forks")):
        found, _ = fused_log_probs(model, model.base_model, inputs, part["scored_from"], part["scored_ids"])
    return found.new_zeros(part["mask"].shape).masked_scatter(part["mask"], found)


def train(model: torch.nn.Module, parts: Sequence[dict[str, Any]], repetition: int) -> float:
    """Return the CPU seconds of forward and backward passes; of the first one alone, to warm up."""
    model.zero_grad()
    started = time.process_time()
    for part in parts[: 1 if repetition < 0 else None]:
        log_probs(model, part).sum().backward()
    return round(time.process_time() - started, 4)


def scored(model: torch.nn.Module, parts: Sequence[dict[str, Any]], weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities, (rows, C), and the gradient of their weighted sum."""
    model.zero_grad()
    found = torch.zeros_like(weights)
    for part in parts:
        of = log_probs(model, part)
        (of * weights[part["rows"], : of.shape[1]]).sum().backward()
        found[part["rows"], : of.shape[1]] = of.detach().float()
    return found, torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def exactness(model: torch.nn.Module, batch: StepBatch, max_tokens: int) -> dict[str, dict[str, float]]:
    """Return by layout how far log-probabilities and gradients are from those of each sample alone."""
    weights = torch.linspace(-1, 1, len(batch) * max(map(len, batch.completion_ids))).view(len(batch), -1)
    half = copy.deepcopy(model).bfloat16()
    for one in (model, half):
        add_fused_lm_head(one, outputs=("log_probs", "entropy"))
    alone = [
        {**part, "rows": [row]}
        for row in range(len(batch))
        for part in micro_batches(part_of(batch, [row]), "padded", 1)
    ]
    wanted, gradient = scored(model, alone, weights)

    def rounded(parts: Sequence[dict[str, Any]]) -> float | None:
        try:
            return (scored(half, parts, weights)[0] - wanted).abs().mean().item()
        except RuntimeError:  # the model's own code mixes dtypes
            return None

    found = {}
    for layout in LAYOUTS:
        parts = micro_batches(batch, layout, max_tokens)
        values, of_layout = scored(model, parts, weights)
        found[layout] = {
            "nats": (values - wanted).abs().max().item(),
            "gradient": ((of_layout - gradient).norm() / gradient.norm()).item(),
            "bf16 alone": rounded(alone),
            "bf16": rounded(parts),
        }
    return found


def measure(model_type: str, samples: dict[str, StepBatch], options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what is found of a model; `None` if it attends by branches, or cannot be built."""
    try:
        model = tiny_model(model_type, VOCABULARY).eval()
        expose_body(model)
        reason = why_not_by_branches(model)
    except Exception:  # of any class: docs/causal_models.json lists them
        return None
    if reason is None:
        return None
    found: dict[str, Any] = {"reason": reason, "why not forked": why_not_forked(model)}
    found["load"] = round(getloadavg()[0], 1)
    if found["why not forked"] is not None:
        return found
    cost = fork_cost(weights_of_a_layer(model), "cpu")
    for name, batch in samples.items():
        rows = np.linspace(0, len(batch) - 1, COMPARED).round().astype(int).tolist()
        exact = exactness(copy.deepcopy(model), part_of(batch, rows), options.max_tokens)
        fused = copy.deepcopy(model)
        add_fused_lm_head(fused, outputs=("log_probs", "entropy"))
        parts = {layout: micro_batches(batch, layout, options.max_tokens, cost) for layout in LAYOUTS}
        runs = {layout: partial(train, fused, part) for layout, part in parts.items()}
        seconds = interleaved(runs, options.repetitions)
        found[name] = {
            layout: {
                "positions": sum(part["row_ids"].numel() for part in parts[layout]),
                "passes": sum(len(part.get("forks", [1])) for part in parts[layout]),
                "seconds": seconds[layout],
                **exact[layout],
            }
            for layout in LAYOUTS
        }
    return found


def page(result: dict[str, Any]) -> str:
    """Return the page of a results file."""
    lines = [f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES)]
    others, forked = [], []
    for model_type, of in result["models"].items():
        if of["why not forked"] is not None:
            why = ": its scan starts from a state of 0" if model_type in MAMBA_1 else ""
            others.append(f"- `{model_type}`: {of['why not forked']}{why}.")
            continue
        forked.append(model_type)
        for name in SAMPLES:
            middle = medians({layout: of[name][layout]["seconds"] for layout in LAYOUTS})
            for layout in LAYOUTS:
                row, faster = of[name][layout], middle["padded"] / middle[layout]
                cells = [
                    f"`{model_type}`",
                    name,
                    f"`{layout}`",
                    f"{row['positions']:,}",
                    f"{middle[layout]:.2f}",
                    f"{faster:.2f}×",
                ]
                cells += [
                    f"{row['nats']:.0e}",
                    f"{row['gradient']:.0e}",
                    "not run" if row["bf16"] is None else f"{row['bf16 alone']:.1g}, {row['bf16']:.1g}",
                ]
                lines.append(f"| {' | '.join(cells)} |")
    machine = result["machine"]
    about = (
        f"`{result['command'].partition(' --models')[0]}`, in several calls with `--models`: "
        f"tiny random models, {result['step samples']} step samples as windows of "
        f"two turns and the same number as whole conversations, forward and backward passes of at "
        f"most {result['max_tokens']:,} positions, medians of {result['repetitions']} on {machine['torch threads']} "
        f"thread. Written by the command, from [results.json](results.json).\n\n"
        "`padded`: one sample per row. "
        "`forked`: a common prefix has its own row, and its cache starts each continuation. *Largest difference* (of "
        "log-probabilities) and *gradient* are float32 distances to each sample alone; *bf16* is the mean distance of "
        "bfloat16 log-probabilities from float32 ones, of each sample alone and in the layout."
    )
    busy = {name: of["load"] for name, of in result["models"].items() if name in forked and of.get("load", 0) >= 1}
    if busy:
        told = ", ".join(f"`{name}` {load:g}" for name, load in busy.items())
        about += f" CPU seconds were measured while other jobs ran; load averages, where recorded: {told}."
    text = ["# Hybrid models that share prefixes by their caches", about, "\n".join(lines)]
    return "\n\n".join([*text, *(["Not forked:\n\n" + "\n".join(others)] if others else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=Path, default=Path("benchmarks/results/positions"))
    parser.add_argument("--step_samples", type=int, default=112)
    parser.add_argument("--max_tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODEL_TYPES, default=list(MODEL_TYPES), metavar="TYPE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    samples = {
        name: part_of(recorded(options.samples / f"{name}.jsonl.gz", 64, **settings), range(options.step_samples))
        for name, settings in SAMPLES.items()
    }
    path = options.output / "results.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    result |= facts("torch", "trl", "transformers", max_tokens=options.max_tokens, repetitions=options.repetitions)
    result["step samples"] = options.step_samples
    for model_type in options.models:
        started = time.perf_counter()
        found = measure(model_type, samples, options)
        if found is not None:
            result["models"] = dict(sorted((result["models"] | {model_type: found}).items()))
            write_results(options.output, result)  # as far as it has come
            (options.output / "README.md").write_text(page(result), encoding="utf-8")
            print(f"{model_type}: {time.perf_counter() - started:.0f} s {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
