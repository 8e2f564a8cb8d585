"""Updates of a checkout of g2po-trl, one at a time, when another process asks: a part of `positions.py`.

    PYTHONPATH=CHECKOUT python -P benchmarks/speed/updates.py SETTINGS

SETTINGS is JSON: `file` of recorded step samples, `samples` of them that are timed, `budget` (tokens of a
micro-batch), `threads`, `model` (`tiny` or `135m`) and `layers` (of the latter). Each line of the input is
`[function, arguments]`, and each line of the output its result. A trainer, a planner and an update are those of the
checkout, so two processes compare two checkouts.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.speed import phases
from benchmarks.speed.positions import part_of, recorded
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, Observation, StepResult, TextEnvironment
from g2po_trl.update.batch import StepBatch
from g2po_trl.update.prefix_order import PrefixOrder


class NeverPlayed(TextEnvironment):
    """Let a trainer be made."""

    def reset(self, **task):
        return Observation("nothing")

    def step(self, action):
        return StepResult("nothing", terminated=True)


class Updates:
    """A trainer of a checkout, and recorded step samples."""

    def __init__(self, folder: str, file: str, samples: int, budget: int, threads: int, model: str, layers: int):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.budget, self.batch = budget, recorded(Path(file), 0)
        self.timed, words = part_of(self.batch, range(samples)), AutoTokenizer.from_pretrained(tiny_model_path())
        most = max(int(ids.max()) for ids in self.batch.sequences())
        if model == "tiny":
            policy = AutoModelForCausalLM.from_pretrained(tiny_model_path())
        else:
            config = LlamaConfig(
                vocab_size=max(len(words), most + 1),
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=layers,
                num_attention_heads=9,
                num_key_value_heads=3,
                head_dim=64,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=words.eos_token_id,
                pad_token_id=words.pad_token_id,
            )
            policy = LlamaForCausalLM(config)
        args = G2POConfig(
            folder,
            per_device_train_batch_size=2,
            num_generations=2,
            max_tokens_per_micro_batch=max(budget, 2**16),  # a plan may ask for less
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        tasks = Dataset.from_list([{"seed": 0}] * 2)
        self.trainer = G2POTrainer(policy, args, tasks, processing_class=words, environment_factory=NeverPlayed)
        self.trainer.current_gradient_accumulation_steps = 1  # what `train` would set
        self.parts: dict[str, list[dict[str, Any]]] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def micro_batches(self, layout: str) -> list[dict[str, Any]]:
        """Return those of the timed step samples, which are made once."""
        if layout not in self.parts:
            update = self.trainer.update
            if layout == "trl":
                self.parts[layout] = phases.trl_micro_batches(self.trainer, self.timed, self.budget)
            else:
                update.layout.kind = layout
                update.config = replace(update.config, max_tokens=self.budget)
                ((self.parts[layout],), _) = update.split([self.timed])
        return self.parts[layout]

    def update(self, layout: str, warm_up: bool = False) -> float:
        """Return the CPU seconds of forward and backward passes."""
        if layout == "floor":
            mean = round(sum(map(len, self.timed.sequences())) / len(self.timed))
            tokens = mean if warm_up else phases.by_kind(self.timed, 0, 0)["different"]
            run = partial(phases.floor, self.trainer, max(1, self.budget // mean), mean, tokens)
        else:
            run = partial(phases.update, self.trainer, self.micro_batches(layout)[: 1 if warm_up else None])
        started = time.process_time()
        run()
        seconds = time.process_time() - started
        if not (warm_up or layout in self.gradients):
            self.gradients[layout] = phases.gradient(self.trainer)
        return round(seconds, 4)

    def distance(self, layout: str) -> float:
        """Return the gradient's distance to that of padded rows, by the length of the latter."""
        wanted = self.gradients["padded"]
        return float((self.gradients[layout] - wanted).norm() / wanted.norm())

    def memory(self, layout: str) -> float:
        """Return MiB by which an update raises the process's peak, gradients included."""
        parts, timed = self.micro_batches(layout), self.timed
        self.timed, self.parts = part_of(timed, [0]), {}
        phases.update(self.trainer, self.micro_batches(layout))  # what libraries keep
        self.trainer.model.zero_grad()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = _kilobytes("VmRSS")
        phases.update(self.trainer, parts)
        return round((_kilobytes("VmHWM") - before) / 1024, 1)

    def plan(self, layout: str, budget: int, mini_batches: int = 1) -> int:
        """Return the positions of an update with all recorded step samples."""
        return int(self._plan(self.batch, layout, budget, mini_batches, 1)[1]["update/forwarded_tokens"])

    def planning(self, layout: str, number: int, ranks: int) -> dict[str, float]:
        """Return seconds, positions and micro-batches of a plan; beyond those recorded, samples have other tokens."""
        copies = -(-number // len(self.batch))
        prompts = [ids + 100_000 * copy for copy in range(copies) for ids in self.batch.prompt_ids][:number]
        completions = (self.batch.completion_ids * copies)[:number]
        ones = np.ones(number)
        many = StepBatch(prompts, completions, ones.astype(np.float32), ones.astype(bool))
        runs = [self._plan(many, layout, self.budget, 1, ranks) for _ in range(3)]
        metrics, seconds = runs[0][1], median(seconds for seconds, _ in runs)
        names = ("forwarded_tokens", "micro_batches", "token_imbalance")
        return {"seconds": round(seconds, 4), **{name: metrics[f"update/{name}"] for name in names}}

    def _plan(self, batch: StepBatch, layout: str, budget: int, mini_batches: int, ranks: int):
        self.trainer.update.layout.kind = layout
        config = self.trainer.update.batching_config()
        config = replace(config, max_tokens=budget, num_mini_batches=mini_batches, mini_batch_size=None)
        order, kept, number = PrefixOrder(batch.sequences()), batch.with_gradient(config.kl), len(batch)
        counts = [number * (rank + 1) // ranks - number * rank // ranks for rank in range(ranks)]
        started = time.process_time()
        plan = config.plan(order, kept, ranks, np.random.default_rng(0))
        seconds = time.process_time() - started
        return seconds, config.metrics(order.lengths, kept, counts, plan)


def _kilobytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is no answer
    with tempfile.TemporaryDirectory() as folder:
        updates = Updates(folder, **json.loads(sys.argv[1]))
        for line in sys.stdin:
            function, arguments = json.loads(line)
            answers.write(json.dumps(getattr(updates, function)(**arguments)) + "\n")
        updates.trainer.close()


if __name__ == "__main__":
    main()
