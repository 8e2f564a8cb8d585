"""Positions and attention pairs of an update, by arrangement of the same recorded step samples.

    python -m benchmarks.speed.positions --output benchmarks/results/positions [--episodes 64] [--max_tokens 2048]
        [--timed 32] [--repetitions 1]

The tiny model plays one iteration of generated ALFWorld games twice: prompts are windows of two turns, or whole
conversations (kept in OUTPUT as `windows.jsonl.gz` and `conversations.jsonl.gz`: token ids of each step sample).
Arrangements are counted, and those that the tiny model takes are timed with the first `--timed` step samples: forward
and backward passes, in CPU seconds of one thread, so that other jobs matter little. Arrangements:

    trl          GRPOTrainer's batch: every row padded to the longest prompt and the longest completion
    trie         AsyncGRPO's rows (`TreeRow`), fed in lexicographic order, with budgets of 2,048 and 32,768 tokens
    masked       common tokens once, under a mask: `shared` without plain rows
    padded, packed, shared, chained, forked
                 g2po-trl's layouts, as a mini-batch is planned for micro-batches of `--max_tokens`

A position is a token that passes through the model, with padding. *Pairs* are those of a position and a place that
its attention scores, per head and layer: all of a row under a mask, those before it in a plain row (SDPA skips the
others), and its path in the trie and in forked rows. *Kept* are bytes that a layer of the tiny model keeps of keys,
values and masks for its backward pass, in the largest micro-batch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.experimental.async_grpo.packing import TreeRow
from trl.trainer.utils import add_fused_lm_head

from benchmarks.common import facts, interleaved, medians, write_results
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl.update.balance import BatchingConfig, RowSummary, plan_micro_batches
from g2po_trl.update.batch import StepBatch
from g2po_trl.update.packing import Pack, RowLength, best_packs, lay_out, lexicographic, packed_log_probs
from g2po_trl.update.prefix_order import Ordering
from g2po_trl.utils.trl_compat import fused_log_probs

LAYOUTS = ("padded", "packed", "masked", "shared", "chained", "forked")
TIMED = ("trl", "padded", "masked", "shared", "forked")
FORK_COST = 16  # tokens; of a model with 256,000 weights a layer, on a CPU
SAMPLES = {"windows": {}, "conversations": {"history": "conversation"}}


def play(folder: Path, episodes: int, **options: Any) -> StepBatch:
    """Return the step samples of one iteration of the tiny model."""
    from benchmarks.speed.phases import make_trainer

    trainer, tasks = make_trainer(folder, episodes, **options)
    trajectories, _ = trainer.play(tasks, groups=[i // 8 for i in range(len(tasks))])
    trainer.close()
    return StepBatch.from_trajectories(trajectories, np.ones(sum(len(t.steps) for t in trajectories)))


def recorded(path: Path, episodes: int, **options: Any) -> StepBatch:
    """Return the step samples of a file, which is made if it is not there."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            batch = play(Path(folder), episodes, **options)
        lines = [json.dumps([p.tolist(), c.tolist()]) for p, c in zip(batch.prompt_ids, batch.completion_ids)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    prompts, completions = ([np.array(row[part], dtype=np.int32) for row in rows] for part in (0, 1))
    ones = np.ones(len(rows))
    return StepBatch(prompts, completions, ones.astype(np.float32), ones.astype(bool))


def part_of(batch: StepBatch, rows: Sequence[int]) -> StepBatch:
    """Return these rows of a batch."""
    return StepBatch(
        [batch.prompt_ids[row] for row in rows],
        [batch.completion_ids[row] for row in rows],
        batch.advantages[list(rows)],
        batch.trained[list(rows)],
    )


def plan(
    batch: StepBatch, layout: str, row_length: RowLength, max_tokens: int, fork_cost: int = FORK_COST
) -> list[list[Pack]]:
    """Return the packed rows of each micro-batch."""
    if layout == "masked":
        ordering, lengths = Ordering.from_sequences(batch.sequences()), np.array(list(map(len, batch.sequences())))
        order = ordering.sort(range(len(batch)))
        overlaps = ordering.neighbours(order, lengths).tolist()
        packs = best_packs(order.tolist(), lengths[order].tolist(), overlaps, row_length)
        packs.sort(key=lambda pack: -pack.num_tokens)
        return [packs[a:b] for a, b in plan_micro_batches([[pack.num_tokens for pack in packs]], max_tokens)]
    if layout == "chained":
        row_length = RowLength(1)
    elif layout == "forked":
        row_length = RowLength(max_tokens, fork_cost=fork_cost)
    config = BatchingConfig(1, max_tokens, "dapo", 0, layout=layout, row_length=row_length)
    rows = RowSummary.concatenate([batch.summary])
    ((mini_batch,), _) = config.plan(rows, Ordering.from_sequences(batch.sequences()), np.random.default_rng(0))
    return [planned.packs[0] for planned in mini_batch]


def count(packs: Sequence[Pack], layout: str, lengths: Sequence[int], cell: int) -> dict[str, int]:
    """Return positions, pairs and bytes kept of a micro-batch; `cell` is the bytes of a token's key and value."""
    if layout == "forked":
        positions = pairs = kept = passes = 0
        for pack in packs:
            passes += len(pack.calls)
            for call in pack.calls:
                rows, length = call.shape
                past = call.segments[0].start if call.parent is not None else 0
                positions += rows * length
                pairs += rows * (length * (past + length) if past else length * (length + 1) // 2)
                kept += rows * (past + length) * cell
        return {"positions": positions, "pairs": pairs, "kept": kept, "passes": passes}
    rows, length = len(packs), max(pack.num_tokens for pack in packs)
    plain = all(common == lengths[before] for pack in packs for before, common in zip(pack.rows, pack.shared[1:]))
    pairs = rows * (length * (length + 1) // 2 if plain else length**2)
    kept = rows * length * cell + (0 if plain else 4 * rows * length**2)
    return {"positions": rows * length, "pairs": pairs, "kept": kept, "passes": 1}


def trie(sequences: Sequence[np.ndarray], completions: Sequence[int], budget: int, cell: int) -> dict[str, int]:
    """Return what `count` does, of AsyncGRPO's rows."""
    rows, found = [TreeRow()], []
    for index in lexicographic(sequences):
        ids = sequences[index]
        mask = np.arange(len(ids)) >= len(ids) - completions[index]
        sample = {"input_ids": ids, "completion_mask": mask, "group_id": 0, "advantage": 1.0}
        sample["old_log_probs"] = np.zeros(len(ids))
        if rows[-1].samples and not rows[-1].fits(sample, budget):
            rows.append(TreeRow())
        rows[-1].add(sample)
    for row in rows:
        keys = len(row.pack()["tree_kv_index"])
        found.append({"positions": len(row.tokens), "pairs": row.load, "kept": keys * cell, "passes": 1})
    return total(found)


def trl_batches(batch: StepBatch, max_tokens: int) -> list[dict[str, torch.Tensor]]:
    """Return GRPOTrainer's micro-batches of about as many positions."""
    whole = batch.collate(range(len(batch)), len(batch), 0)
    rows = max(1, round(max_tokens / (whole["prompt_ids"].shape[1] + whole["completion_ids"].shape[1])))
    return [{name: of[i : i + rows] for name, of in whole.items()} for i in range(0, len(batch), rows)]


def seconds(batch: StepBatch, max_tokens: int, repetitions: int) -> dict[str, list[float]]:
    """Return CPU seconds of an update of the tiny model, by arrangement."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    row_length = RowLength.from_config(model.config, "sdpa", max_tokens)
    completions = list(map(len, batch.completion_ids))

    def trl(part: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask = (torch.cat([part[f"prompt_{of}"], part[f"completion_{of}"]], 1) for of in ("ids", "mask"))
        first = part["prompt_ids"].shape[1]
        scored = part["completion_mask"].flatten().nonzero().flatten()
        width, long = part["completion_ids"].shape[1], ids.shape[1]
        places = scored // width * long + first + scored % width - 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        return fused_log_probs(model, model.base_model, inputs, places, part["completion_ids"].flatten()[scored])[0]

    def ours(packs: list[Pack]) -> torch.Tensor:
        mask = torch.arange(max(completions)) < torch.tensor([completions[r] for p in packs for r in p.rows])[:, None]
        return packed_log_probs(model, model.base_model, lay_out(packs, batch.sequences(), completions, 0), mask)[0]

    parts = {"trl": trl_batches(batch, max_tokens)}
    parts |= {layout: plan(batch, layout, row_length, max_tokens) for layout in TIMED[1:]}

    def update(name: str, repetition: int) -> float:
        started = time.process_time()
        for part in parts[name][: 1 if repetition < 0 else None]:
            (trl if name == "trl" else ours)(part).sum().backward()
        return round(time.process_time() - started, 3)

    return interleaved({name: partial(update, name) for name in parts}, repetitions)


def total(counted: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return sums over micro-batches, and the largest of what is kept."""
    summed = {name: sum(of[name] for of in counted) for name in ("positions", "pairs", "passes")}
    return {**summed, "kept": max(of["kept"] for of in counted)}


def compare(batch: StepBatch, max_tokens: int) -> dict[str, Any]:
    """Return counts by arrangement."""
    config, sequences = AutoConfig.from_pretrained(tiny_model_path()), batch.sequences()
    cell = 2 * 4 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    lengths, completions = list(map(len, sequences)), list(map(len, batch.completion_ids))
    row_length = RowLength.from_config(config, "sdpa", max_tokens)
    width = max(map(len, batch.prompt_ids)) + max(completions)
    rows = max(1, round(max_tokens / width))
    found = {
        "trl": {
            "positions": len(batch) * width,
            "pairs": len(batch) * width**2,
            "kept": rows * width * (cell + 4 * width),
            "passes": -(-len(batch) // rows),
        }
    }
    for budget in (2048, 32768):
        found[f"trie {budget}"] = trie(sequences, completions, budget, cell)
    for layout in LAYOUTS:
        parts = plan(batch, layout, row_length, max_tokens)
        found[layout] = total([count(packs, layout, lengths, cell) for packs in parts])
    return {"step samples": len(batch), "tokens": sum(lengths), "longest": max(lengths), "counts": found}


def page(result: dict[str, Any]) -> str:
    """Return the page of a results file."""
    lines = [
        "# Positions by layout\n",
        f"One iteration of generated ALFWorld games, played by the tiny model; written by `{result['command']}`, from "
        "[results.json](results.json). The docstring of the program defines the counts. CPU seconds are those of "
        "forward and backward passes of the first step samples.",
    ]
    for name in SAMPLES:
        of, timed = result[name], medians(result[name]["CPU seconds"])
        about = f"{of['step samples']} step samples, {of['tokens']:,} tokens; {of['timed']} are timed"
        lines += [f"\n## {name.capitalize()}\n", f"{about}.\n"]
        lines += ["| Layout | Positions | TRL / layout | Pairs, millions | Kept, MB | Passes | CPU seconds |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for arrangement, row in of["counts"].items():
            fewer = of["counts"]["trl"]["positions"] / row["positions"]
            cells = [f"`{arrangement}`", f"{row['positions']:,}", f"{fewer:.2f}×", f"{row['pairs'] / 1e6:.1f}"]
            cells += [f"{row['kept'] / 2**20:.1f}", str(row["passes"]), f"{timed.get(arrangement, '')}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--max_tokens", type=int, default=2048)
    parser.add_argument("--timed", type=int, default=32, help="step samples; 0: nothing is timed")
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = facts("torch", "trl", "transformers")
    for name, settings in SAMPLES.items():
        batch = recorded(options.output / f"{name}.jsonl.gz", options.episodes, **settings)
        result[name] = {**compare(batch, options.max_tokens), "timed": options.timed, "CPU seconds": {}}
    for name in SAMPLES if options.timed else ():
        first = part_of(recorded(options.output / f"{name}.jsonl.gz", options.episodes), range(options.timed))
        result[name]["CPU seconds"] = seconds(first, options.max_tokens, options.repetitions)
    write_results(options.output, result)
    (options.output / "README.md").write_text(page(result), encoding="utf-8")
    print(page(result))


if __name__ == "__main__":
    main()
