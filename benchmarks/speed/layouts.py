"""The update by token layout on the same recorded step samples: CPU seconds, positions and memory.

    python -m benchmarks.speed.layouts --output benchmarks/results/positions [--samples 96] [--budget 2048]
        [--threads 1] [--repetitions 5] [--shape 0.5b] [--episodes 64]

The tiny model plays one iteration of generated ALFWorld games twice: prompts are windows of two turns, or whole
conversations (kept in OUTPUT as `windows.jsonl.gz` and `conversations.jsonl.gz`: token ids of each step sample). The
first `--samples` of them are trained, by the tiny model or by Qwen2.5 of that size with random weights. Arms take
turns in each repetition:

    tree      common tokens once (`token_layout="shared"`)
    padded    a sample a row (`token_layout="padded"`)
    trl       GRPOTrainer's batch: every row padded to the longest prompt and the longest completion
    floor     the model's body over as many tokens as are different, in rows of the mean length: no LM head, no loss

CPU seconds are those of forward and backward passes. Memory is what the largest micro-batch keeps for its backward
pass. Positions are tokens that pass through the model, with padding, in a plan of all recorded step samples; `async`
are the rows of TRL's AsyncGRPO (`TreeRow`), fed in lexicographic order.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import facts, interleaved, medians, read_lines, write_results
from benchmarks.trees import make_trees
from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_environment, tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer
from g2po_trl.update.batch import StepBatch, loss_scale
from g2po_trl.update.tree import in_order
from g2po_trl.utils.trl_compat import replaced

SHAPES = {  # hidden size, intermediate size, layers, heads, key-value heads, vocabulary
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
SAMPLES = {"windows": {}, "conversations": {"history": "conversation"}}
LAYOUTS = {"tree": "shared", "padded": "padded"}  # arm -> `token_layout`
BUDGETS = (2048, 4096, 16384, 32768)


def random_model(shape: str | tuple[int, ...]) -> Qwen2ForCausalLM:
    """A Qwen2.5 of that size with random weights, for the tiny model's tokenizer; on the GPU if there is one."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape] if isinstance(shape, str) else shape
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=shape != "7b",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen2ForCausalLM(config)


def make_shape(folder: Path, shape: str | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Path:
    """A folder with such a model and its tokenizer."""
    random_model(shape).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_path()).save_pretrained(folder)
    return folder


def make_trainer(
    folder: Path, episodes: int = 8, shape: str | None = None, **options: Any
) -> tuple[G2POTrainer, list]:
    """A trainer on generated ALFWorld games, and the tasks of as many episodes. `options`: fields of `G2POConfig`."""
    generate_games(folder / "games", "train", episodes // 8, seed=0, size="tiny", progress=False)
    manifest = Manifest.scan(folder / "games")
    args = G2POConfig(
        str(folder / "out"),
        overwrite=True,  # each measurement is a run of its own
        per_device_train_batch_size=episodes,
        num_generations=8,
        max_turns=15,
        max_prompt_length=1024,
        max_completion_length=24,
        max_tokens_per_micro_batch=2**16,  # a plan may ask for less
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        save_trajectories=False,
        disable_tqdm=True,
        **options,
    )
    trainer = G2POTrainer(
        str(make_shape(folder / "model", shape) if shape else tiny_model_path()),
        args,
        Dataset.from_list(manifest.rows()),
        environment_factory=partial(tiny_environment, manifest),
        prompt_template=ALFWORLD_COMPACT_PROMPT,
    )
    trainer.current_gradient_accumulation_steps = 1  # what `train` would set
    return trainer, [row for row in manifest.rows() for _ in range(8)]


def batch_of(prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> StepBatch:
    """Step samples with an advantage of 1."""
    ones = np.ones(len(prompts))
    return StepBatch(list(prompts), list(completions), ones.astype(np.float32), ones.astype(bool))


def recorded(path: Path, episodes: int = 64, **options: Any) -> StepBatch:
    """The step samples of a file, which is made if it is not there: one iteration of the tiny model."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            trainer, tasks = make_trainer(Path(folder), episodes, **options)
            played, _ = trainer.play(tasks, groups=[i // 8 for i in range(len(tasks))])
            trainer.close()
        steps = [[step.prompt_ids, step.completion_ids] for trajectory in played for step in trajectory.steps]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, steps)).encode(), mtime=0))
    rows = read_lines(path)
    return batch_of(*([np.array(row[part], dtype=np.int32) for row in rows] for part in (0, 1)))


def trl_micro_batches(trainer: G2POTrainer, batch: StepBatch, max_tokens: int) -> list[dict[str, Any]]:
    """TRL's batch: the whole rollout padded to its longest row, in random order, cut into equal pieces."""
    order = np.random.default_rng(0).permutation(len(batch)).tolist()
    whole = batch.collate(order, len(order), trainer.processing_class.pad_token_id)
    rows = max(1, round(max_tokens / (whole["prompt_ids"].shape[1] + whole["completion_ids"].shape[1])))
    parts, tokens = [], batch.num_trained_tokens()
    for start in range(0, len(order), rows):
        part = {name: tensor[start : start + rows] for name, tensor in whole.items()}
        part["num_items_in_batch"] = torch.tensor(tokens)
        part["loss_scale"] = loss_scale(trainer.args.loss_type, part, len(batch), tokens, 1, 1)
        parts.append(part)
    return parts


def count(micro_batches: list[dict[str, Any]], model: Qwen2ForCausalLM) -> dict[str, float]:
    """Positions through the model, and FLOPs of one forward pass: 2 a weight and position, 4 H T a position attending
    over T (all of its row, in a tree those of its branch's path); the LM head for scored positions."""
    config, head = model.config, model.get_output_embeddings().weight.numel()
    weights = sum(p.numel() for name, p in model.named_parameters() if "layers." in name)
    shapes = [
        tuple(m["row_ids"].shape)
        if "row_ids" in m
        else (len(m["prompt_ids"]), m["prompt_ids"].shape[1] + m["completion_ids"].shape[1])
        for m in micro_batches
    ]
    positions = sum(rows * length for rows, length in shapes)
    pairs = sum(
        sum(queries * keys for queries, keys in m.get("branches", [(rows * length, length)]))
        for m, (rows, length) in zip(micro_batches, shapes)
    )
    attention = pairs * 4 * config.hidden_size * config.num_hidden_layers
    scored = sum(int(m["completion_mask"].sum()) for m in micro_batches)
    return {
        "micro_batches": len(micro_batches),
        "positions": positions,
        "forward_gflop": round((2 * weights * positions + attention + 2 * head * scored) / 1e9, 2),
    }


def different_tokens(sequences: Sequence[np.ndarray]) -> int:
    """Tokens of the samples' prefix tree, each node once."""
    return sum(tree.num_tokens for tree in make_trees(sequences, 2**40))


def async_positions(batch: StepBatch, budget: int) -> int:
    """Positions of AsyncGRPO's rows."""
    from trl.experimental.async_grpo.packing import TreeRow

    sequences, rows = batch.sequences(), [TreeRow()]
    for index in in_order(sequences, range(len(sequences)))[0]:
        ids = sequences[index]
        mask = np.arange(len(ids)) >= len(ids) - len(batch.completion_ids[index])
        sample = {"input_ids": ids, "completion_mask": mask, "group_id": 0, "advantage": 1.0}
        if rows[-1].samples and not rows[-1].fits(sample, budget):
            rows.append(TreeRow())
        rows[-1].add(sample)
    return sum(len(row.tokens) for row in rows)


def backward(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> None:
    """Forward and backward of all micro-batches, by the trainer's own loss, added to the gradient that is there."""

    def train(micro_batch: dict[str, Any]) -> torch.Tensor:
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(micro_batch))
        loss.backward()
        return loss.detach()

    with layout_of(trainer, micro_batches):
        trainer.update.backward(trainer.model, micro_batches, train)


def add_log_probs(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> None:
    """Add the log-probabilities that training needs, computed as the loss computes its own."""

    def score(model: torch.nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        batch = trainer._prepare_inputs(micro_batch)
        ids, mask = (
            torch.cat([batch[f"{of}_{name}"] for of in ("prompt", "completion")], 1) for name in ("ids", "mask")
        )
        return trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].size(1))[0]

    of_trl = {} if "row_ids" in micro_batches[0] else {"score": score}
    with layout_of(trainer, micro_batches), replaced(trainer.update.log_probs, **of_trl):
        trainer._add_log_probs([micro_batches])


def layout_of(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> AbstractContextManager:
    """A context in which micro-batches are in the trainer's layout, or TRL's, if they are TRL's batch."""
    if "row_ids" in micro_batches[0]:
        return nullcontext()
    return replaced(trainer.update.layout, of=lambda *given: nullcontext())


def split(trainer: G2POTrainer, batch: StepBatch, layout: str, budget: int) -> tuple[list[dict[str, Any]], dict]:
    """Micro-batches of a layout, and the metrics of the plan."""
    update = trainer.update
    update.layout.kind, update.config = layout, replace(update.config, max_tokens=budget)
    (micro_batches,), metrics = update.split([batch])
    return micro_batches, metrics


def floor(trainer: G2POTrainer, rows: int, length: int, tokens: int) -> None:
    body = trainer.accelerator.unwrap_model(trainer.model).base_model
    ids = torch.zeros(rows, length, dtype=torch.long, device=trainer.accelerator.device)
    for start in range(0, tokens, rows * length):
        part = ids[: max(1, min(rows, round((tokens - start) / length)))]
        body(input_ids=part, use_cache=False).last_hidden_state.sum().backward()


def kept_memory(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> float:
    """MB that the largest micro-batch keeps for its backward pass, weights left out."""
    weights, peak = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}, 0
    for micro_batch in micro_batches:
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # with its graph, it would be a cycle, which nothing frees

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            with layout_of(trainer, [micro_batch]), trainer.update.layout.of(trainer.model, micro_batch):
                trainer.compute_loss(trainer.model, trainer._prepare_inputs(micro_batch))
        peak = max(peak, sum(kept.values()))
    return round(peak / 2**20, 1)


def compare(trainer: G2POTrainer, batch: StepBatch, options: argparse.Namespace) -> dict[str, Any]:
    """All that is measured with the step samples of a file."""
    chosen = slice(options.samples)
    timed = batch_of(batch.prompt_ids[chosen], batch.completion_ids[chosen])
    made = {arm: split(trainer, timed, layout, options.budget)[0] for arm, layout in LAYOUTS.items()}
    made["trl"] = trl_micro_batches(trainer, timed, options.budget)
    mean = round(sum(map(len, timed.sequences())) / len(timed))
    different = different_tokens(timed.sequences())
    runs = {arm: partial(backward, trainer, micro_batches) for arm, micro_batches in made.items()}
    runs["floor"] = partial(floor, trainer, max(1, options.budget // mean), mean, different)
    gradients: dict[str, torch.Tensor] = {}

    def update(arm: str, repetition: int) -> float:
        if arm in made:
            trainer.update.layout.kind = LAYOUTS.get(arm, "padded")
        trainer.model.train()
        trainer.model.zero_grad()
        started = time.process_time()
        runs[arm]()
        seconds = time.process_time() - started
        gradients[arm] = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
        return round(seconds, 4)

    seconds = interleaved({arm: partial(update, arm) for arm in runs}, options.repetitions)
    wanted, longest = gradients["padded"], max(map(len, batch.prompt_ids)) + max(map(len, batch.completion_ids))
    memory = {}
    for arm, micro_batches in made.items():
        trainer.update.layout.kind = LAYOUTS.get(arm, "padded")
        memory[arm] = kept_memory(trainer, micro_batches)
    budgets = {}
    for budget in BUDGETS:
        plans = {arm: split(trainer, batch, layout, budget)[1] for arm, layout in LAYOUTS.items()}
        budgets[budget] = {arm: int(metrics["update/forwarded_tokens"]) for arm, metrics in plans.items()}
        budgets[budget]["async"] = async_positions(batch, budget)
    return {
        "step samples": len(batch),
        "tokens": sum(map(len, batch.sequences())),
        "different tokens": different_tokens(batch.sequences()),
        "positions of trl": len(batch) * longest,
        "positions by budget": budgets,
        "timed": len(timed),
        "counts": {arm: count(micro_batches, trainer.model) for arm, micro_batches in made.items()},
        "CPU seconds": seconds,
        "gradient, relative distance to padded": {
            arm: float((gradients[arm] - wanted).norm() / wanted.norm()) for arm in ("tree", "trl")
        },
        "memory, MiB": memory,
    }


def page(result: dict[str, Any]) -> str:
    """The page of a results file."""
    text = [
        "# The update by layout, on recorded step samples",
        f"One iteration of generated ALFWorld games, played by the tiny model; written by `{result['command']}`, from "
        "[results.json](results.json). The docstring of the program defines arms and counts. CPU seconds are medians "
        f"of {result['repetitions']} repetitions.",
    ]
    for name in SAMPLES:
        of, middle = result[name], medians(result[name]["CPU seconds"])
        text += [
            f"## {name.capitalize()}",
            f"{of['step samples']} step samples, {of['tokens']:,} tokens, of which {of['different tokens']:,} are "
            f"different; GRPOTrainer's batch has {of['positions of trl']:,} positions. {of['timed']} are timed.",
        ]
        distances, memory = of["gradient, relative distance to padded"], of["memory, MiB"]
        lines = ["| Arm | CPU seconds | Arm / tree | Memory, MiB | Gradient, from padded |", "|---|---|---|---|---|"]
        for arm, seconds in middle.items():
            cells = f"{seconds:.3f} | {seconds / middle['tree']:.2f}× | {memory.get(arm, '')}"
            lines.append(f"| `{arm}` | {cells} | {f'{distances[arm]:.0e}' if arm in distances else ''} |")
        lines += ["", "| Budget | `tree`, positions | `padded`, positions | `async`, positions |", "|---|---|---|---|"]
        for budget, row in of["positions by budget"].items():
            lines.append(f"| {budget:,} | {' | '.join(f'{row[arm]:,}' for arm in ('tree', 'padded', 'async'))} |")
        text.append("\n".join(lines))
    return "\n\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--samples", type=int, default=96, help="step samples that are trained")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this size instead of the tiny model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = facts("torch", "trl", "transformers", repetitions=options.repetitions)
    batches = {
        name: recorded(options.output / f"{name}.jsonl.gz", options.episodes, **settings)
        for name, settings in SAMPLES.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = make_trainer(Path(folder), shape=options.shape)
        result |= {name: compare(trainer, batch, options) for name, batch in batches.items()}
        trainer.close()
    write_results(options.output, result)
    (options.output / "README.md").write_text(page(result), encoding="utf-8")
    print(page(result))


if __name__ == "__main__":
    main()
