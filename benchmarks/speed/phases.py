"""Log-probabilities and update of one iteration, in every token layout, on the same recorded trajectories.

    python -m benchmarks.speed.phases --output benchmarks/results/phases [--repetitions 5] [--trajectories FILE]
        [--model PATH | --shape 1.5b] [--episodes 64] [--max_tokens 2048] [--prompt compact|full]
        [--attention sdpa|eager|flex_attention]

Trajectories are a run's `trajectories/train-*.jsonl`, or 64 episodes that the tiny model plays first (8 generated
ALFWorld games, 8 each; kept in OUTPUT). The model is the tiny one; or `--model`, a checkpoint, on the same token ids;
or `--shape`, Qwen2.5 of that size with random weights. On a GPU arithmetic is bfloat16. Layouts, in turn in each
repetition:

    trl       every row padded to the longest prompt and the longest completion of the rollout, in random order, as
              many rows a micro-batch as come nearest to `--max_tokens`: TRL's batch
    padded    sorted by length, padded to the longest of the micro-batch (`token_layout="padded"`)
    shared    what rows have in common once (`token_layout="shared"`)
    floor     the model's body forward and backward over as many tokens as are different, in rows of the mean length:
              no LM head, no loss, no padding

Prompts are built too, as their texts came turn by turn: by the tokenizer, and by looking up words it has seen.

Then, with the tiny model, some iterations of training itself, and what of them is neither model nor environment.

Prints the command, the machine, raw seconds, medians, ratios, tokens and FLOPs by count, and peak memory; writes them
to OUTPUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from benchmarks.common import facts, interleaved, medians, write_results
from benchmarks.trees import make_trees
from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, ALFWORLD_PROMPT, AlfworldEnvironment, Manifest
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, StateGraph, g2po, read_jsonl, write_jsonl
from g2po_trl.update.batch import StepBatch, loss_scale
from g2po_trl.utils.trl_compat import replaced

SHAPES = {  # hidden size, intermediate size, layers, heads, key-value heads, vocabulary
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
LAYOUTS = ("trl", "padded", "shared")
PROMPTS = {"compact": ALFWORLD_COMPACT_PROMPT, "full": ALFWORLD_PROMPT}


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
    folder: Path,
    episodes: int,
    max_tokens: int = 2048,
    prompt: str = "compact",
    model: Path | None = None,
    shape: str | None = None,
    attention: str = "sdpa",
    gradient_checkpointing: bool = False,
    **options: Any,
) -> tuple[G2POTrainer, list[dict[str, Any]]]:
    """A trainer and the tasks of as many episodes; other arguments as the command's, or G2POConfig's."""
    from g2po_envs.alfworld import generate_games

    generate_games(folder / "games", "train", episodes // 8, seed=0, size="tiny")
    manifest = Manifest.scan(folder / "games")
    on_gpu = torch.cuda.is_available()
    args = G2POConfig(
        str(folder / "out"),
        overwrite=True,  # each measurement is a run of its own
        per_device_train_batch_size=episodes,
        num_generations=8,
        max_turns=15,
        max_prompt_length=1024,
        max_completion_length=24,
        max_tokens_per_micro_batch=max_tokens,
        model_init_kwargs={"attn_implementation": attention},
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=gradient_checkpointing,
        beta=0.01,
        report_to="none",
        save_strategy="no",
        save_trajectories=False,
        disable_tqdm=True,
        **options,
    )
    trainer = G2POTrainer(
        str(make_shape(folder / "model", shape) if shape else model or tiny_model_path()),
        args,
        Dataset.from_list(manifest.rows()),
        environment_factory=partial(
            AlfworldEnvironment, manifest, hidden_actions=("help", "look", "inventory", "examine"), intro=False
        ),
        prompt_template=PROMPTS[prompt],
    )
    trainer.current_gradient_accumulation_steps = 1  # what `train` would set
    return trainer, [row for row in manifest.rows() for _ in range(8)]


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


def measure(trainer: G2POTrainer, run: Callable[[], None]) -> float:
    """Seconds."""
    wait = torch.cuda.synchronize if trainer.accelerator.device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started


def peak_memory(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> float:
    """MB of an update above what is held: the allocator's peak on a GPU; on a CPU, what the largest micro-batch keeps
    for its backward pass, by count."""
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        update(trainer, micro_batches)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    peak = 0
    for micro_batch in micro_batches:
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # with its graph, it would be a cycle, which nothing frees

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            with layout_of(trainer, [micro_batch]), trainer.update.layout.of(trainer.model, micro_batch):
                loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(micro_batch))
        peak = max(peak, sum(kept.values()))
        del loss
    return peak / 2**20


def variants(
    trainer: G2POTrainer, batch: StepBatch, max_tokens: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    """Micro-batches of each layout, and tokens in them, without padding."""
    made = {"trl": trl_micro_batches(trainer, batch, max_tokens)}
    tokens = {"trl": int(batch.lengths().sum())}
    for layout in LAYOUTS[1:]:
        trainer.update.layout.kind = layout
        ((made[layout],), metrics) = trainer.update.split([batch])
        tokens[layout] = round(metrics["update/forwarded_tokens"] * (1 - metrics["update/padding_fraction"]))
    return made, tokens


def by_kind(batch: StepBatch, tokens: int, positions: int) -> dict[str, int]:
    """Positions that pass through the model: tokens that are different (each node of the samples' prefix tree once),
    tokens that another sample's beginning holds already, padding."""
    sequences = batch.sequences()
    different = sum(tree.num_tokens for tree in make_trees(sequences, 2**40))
    return {"different": different, "repeated": tokens - different, "padding": positions - tokens}


def prompt_texts(trainer: G2POTrainer, trajectories: list) -> list[list[str]]:
    """What was read, turn by turn."""
    turns: list[list[str]] = [[] for _ in range(max(len(t.steps) for t in trajectories))]
    for trajectory in trajectories:
        for texts, step in zip(turns, trajectory.steps):
            texts.append(trainer.processing_class.decode(step.prompt_ids))
    return turns


def tokenize(trainer: G2POTrainer, turns: list[list[str]]) -> None:
    for texts in turns:
        trainer.processing_class(texts, add_special_tokens=False)


def update(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> None:
    """Forward and backward of all micro-batches, by the trainer's own loss."""
    trainer.model.train()
    trainer.model.zero_grad()
    backward(trainer, micro_batches)


def backward(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> None:
    """The same, added to the gradient that is there."""

    def train(micro_batch: dict[str, Any]) -> torch.Tensor:
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(micro_batch))
        loss.backward()
        return loss.detach()

    with layout_of(trainer, micro_batches):
        trainer.update.backward(trainer.model, micro_batches, train)


def add_log_probs(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> None:
    with layout_of(trainer, micro_batches):
        trainer._add_log_probs([micro_batches])


def layout_of(trainer: G2POTrainer, micro_batches: list[dict[str, Any]]) -> AbstractContextManager:
    """A context in which micro-batches are in the trainer's layout, or TRL's, if they are TRL's batch."""
    if "row_ids" in micro_batches[0]:
        return nullcontext()
    return replaced(trainer.update.layout, "of", lambda *given: nullcontext())


def floor(trainer: G2POTrainer, rows: int, length: int, tokens: int) -> None:
    body = trainer.accelerator.unwrap_model(trainer.model).base_model
    body.zero_grad()
    ids = torch.zeros(rows, length, dtype=torch.long, device=trainer.accelerator.device)
    for start in range(0, tokens, rows * length):
        with trainer.accelerator.autocast():
            part = ids[: max(1, min(rows, round((tokens - start) / length)))]
            body(input_ids=part, use_cache=False).last_hidden_state.sum().backward()


class Clock(TrainerCallback):
    """Seconds of each iteration and of its optimizer step."""

    def __init__(self):
        self.iterations: list[float] = []
        self.optimizer: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.started = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.optimizer.append(time.perf_counter())

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.optimizer[-1] = time.perf_counter() - self.optimizer[-1]

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.iterations.append(time.perf_counter() - self.started)


def whole_iterations(trainer: G2POTrainer, number: int) -> dict[str, Any]:
    """Training itself: what of an iteration is neither model, nor generation, nor environment."""
    clock = Clock()
    trainer.add_callback(clock)
    trainer.args.max_steps = number + 1
    trainer.update.layout.kind = trainer.args.token_layout
    trainer.train()
    logs = [log for log in trainer.state.log_history if "time/update" in log]
    names = ("generation", "environment", "prompts", "advantage", "batch", "logps", "update")
    parts: dict[str, list[float]] = {name: [log[f"time/{name}"] for log in logs][1:] for name in names}
    parts |= {"optimizer": clock.optimizer[1:], "iteration": clock.iterations[1:]}
    work = zip(*(parts[name] for name in ("generation", "environment", "logps", "update", "optimizer")))
    rest = [1 - sum(seconds) / whole for seconds, whole in zip(work, parts["iteration"])]
    return {
        "seconds": {name: [round(value, 4) for value in values] for name, values in parts.items()},
        "medians": medians(parts, 4),
        "neither model nor generation nor environment, share": round(median(rest), 4),
        "graph and advantages, share": round(
            median(a / whole for a, whole in zip(parts["advantage"], parts["iteration"])), 5
        ),
    }


def gradient(trainer: G2POTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trajectories", type=Path, help="a run's trajectories/train-*.jsonl")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the tiny model")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this size instead of the tiny model")
    parser.add_argument("--prompt", choices=list(PROMPTS), default="compact")
    parser.add_argument("--attention", choices=("sdpa", "eager", "flex_attention"), default="sdpa")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--max_tokens", type=int, default=2048)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer, tasks = make_trainer(
            Path(folder),
            options.episodes,
            options.max_tokens,
            options.prompt,
            options.model,
            options.shape,
            options.attention,
            options.gradient_checkpointing,
        )
        path = options.trajectories or options.output / "trajectories.jsonl"
        if not path.exists():
            write_jsonl(path, trainer.play(tasks, groups=[i // 8 for i in range(len(tasks))])[0])
        result = compare(trainer, list(read_jsonl(path)), options)
        if not (options.shape or options.model):
            result["whole iterations"] = whole_iterations(trainer, options.repetitions)
        trainer.close()
    write_results(options.output, result)
    print(json.dumps(result, indent=1))


def compare(trainer: G2POTrainer, trajectories: list, options: argparse.Namespace) -> dict[str, Any]:
    groups = [trajectories[i : i + 8] for i in range(0, len(trajectories), 8)]
    started = time.perf_counter()
    advantages = g2po(StateGraph.from_groups(groups))
    advantage_time = time.perf_counter() - started
    batch = StepBatch.from_trajectories([t for group in groups for t in group], advantages)
    started = time.perf_counter()
    made, tokens = variants(trainer, batch, options.max_tokens)
    batch_time = (time.perf_counter() - started) / len(made)
    counts = {name: count(micro_batches, trainer.model) for name, micro_batches in made.items()}
    kinds = {name: by_kind(batch, tokens[name], counts[name]["positions"]) for name in made}
    mean_length = round(tokens["trl"] / len(batch))
    runs: dict[str, Callable[[], None]] = {}
    for name, micro_batches in made.items():
        runs[f"logps {name}"] = partial(add_log_probs, trainer, micro_batches)
        runs[f"update {name}"] = partial(update, trainer, micro_batches)
    rows = max(1, options.max_tokens // mean_length)
    runs["update floor"] = partial(floor, trainer, rows, mean_length, kinds["trl"]["different"])
    texts = prompt_texts(trainer, trajectories)
    runs["prompts tokenized"] = partial(tokenize, trainer, texts)
    gradients = {}

    def timed(name: str, repetition: int) -> float:
        took = measure(trainer, runs[name])
        if name.startswith("update") and name != "update floor" and repetition == 0:
            gradients[name.split()[1]] = gradient(trainer)
        return round(took, 4)

    seconds = interleaved({name: partial(timed, name) for name in runs}, options.repetitions)
    middle = medians(seconds)
    whole = {name: middle[f"logps {name}"] + middle[f"update {name}"] for name in made}
    base = gradients["padded"]
    return {
        **facts("trl", "transformers", "torch"),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "step samples": len(batch),
        "tokens": tokens["trl"],
        "counts": counts,
        "positions by kind": kinds,
        "positions, trl's by": {
            name: round(counts["trl"]["positions"] / c["positions"], 2) for name, c in counts.items()
        },
        "seconds": seconds,
        "medians": medians(seconds, 3),
        "logps and update, trl's time by": {name: round(whole["trl"] / value, 2) for name, value in whole.items()},
        "update, by the floor's time": {
            name: round(middle[f"update {name}"] / middle["update floor"], 2) for name in made
        },
        "peak memory in MB": {name: round(peak_memory(trainer, part), 1) for name, part in made.items()},
        "gradient, relative distance to padded": {
            name: f"{((g - base).norm() / base.norm()).item():.1e}" for name, g in gradients.items()
        },
        "prompt tokens": sum(len(step.prompt_ids) for t in trajectories for step in t.steps),
        "advantages and graph in s": round(advantage_time, 4),
        "cutting into micro-batches in s": round(batch_time, 4),
    }


if __name__ == "__main__":
    main()
