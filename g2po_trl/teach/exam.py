"""Exams during fine-tuning: episodes on tasks that were not shown, and the success rate that ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.engines.transformers import TransformersEngine
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.prompts.chat_template import get_tokenizer
from g2po_trl.prompts.images import ImageInputs
from g2po_trl.prompts.template import PromptTemplate
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.runs.callbacks import joined
from g2po_trl.runs.metrics import summarize
from g2po_trl.trajectory import Trajectory, write_jsonl
from g2po_trl.utils.json import write_json


@dataclass
class SuccessEvaluation:
    """Evaluation episodes during fine-tuning, and the success rate that ends it.

    Args:
        environment_factory: constructs the environment.
        rows: tasks, each played once.
        template, history_length: of prompts, as in the rollout.
        prompts: further fields of the rollout's `PromptActor`.
        chat_template_kwargs: variables of the chat template.
        limits: number and limits of environment workers.
        max_turns: turns per episode.
        sampling: sampling of completions.
        target: success rate at which fine-tuning ends.
        target_valid: fraction of well-formed completions that it needs as well.
        every: optimizer steps between evaluations.
        batch_tokens: maximum tokens of a generation batch.
    """

    environment_factory: Callable[[], Any]
    rows: Sequence[dict[str, Any]]
    template: PromptTemplate
    history_length: int
    max_turns: int
    sampling: Sampling
    target: float
    every: int
    target_valid: float = 0.0
    prompts: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] | None = None
    limits: PoolLimits = field(default_factory=PoolLimits)
    batch_tokens: int = 16_384

    def is_passed(self, summary: Mapping[str, Any]) -> bool:
        """Return whether the results of an evaluation reach the targets."""
        return summary["success_rate"] >= self.target and summary["valid_action_ratio"] >= self.target_valid

    def evaluate(
        self,
        model: torch.nn.Module,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        pool: EnvironmentPool,
        seed: int,
        make_actor: Callable[..., PromptActor] = PromptActor,
    ) -> tuple[dict[str, Any], list[Trajectory]]:
        """Play all tasks in evaluation mode with a separate random state; return the summary and the trajectories."""
        was_training, cache = model.training, model.config.use_cache
        model.eval()
        model.config.use_cache = True
        try:
            with torch.random.fork_rng():
                torch.manual_seed(derived_seed(seed, 0))
                tokenizer = get_tokenizer(processing_class)
                engine = TransformersEngine.from_model(model, tokenizer, batch_tokens=self.batch_tokens)
                engine.read_images(ImageInputs.of(processing_class, model))
                encode = ChatEncoder(processing_class, self.chat_template_kwargs)
                actor = make_actor(engine, encode, self.template, self.history_length, **self.prompts)
                trajectories, _ = Player(pool, actor, EpisodeLimits(self.max_turns)).play(self.rows, self.sampling)
        finally:
            model.config.use_cache = cache
            model.train(was_training)
        return summarize(trajectories, [row.get("task_type") for row in self.rows]), trajectories


class SuccessEvalCallback(TrainerCallback):
    """Evaluates every `evaluation.every` steps and at the end, and stops training at the target success rate.

    The episodes are written to output_dir/exams, the results to output_dir/exams/results.json.

    Args:
        exam: the evaluation.
        processing_class: the model's tokenizer or processor.
        pool: runs the environment.
        samples_per_step: samples per optimizer step.
        num_samples: total samples if the number of epochs ends training, else `None`.
    """

    def __init__(
        self,
        exam: SuccessEvaluation,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        pool: EnvironmentPool,
        samples_per_step: int,
        num_samples: int | None,
    ):
        self.exam, self.processing_class, self.pool = exam, processing_class, pool
        self.samples_per_step, self.num_samples = samples_per_step, num_samples
        self.results: list[dict[str, Any]] = []
        self.started = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, known = time.perf_counter(), Path(args.output_dir, "exams", "results.json")
        if state.global_step and known.is_file():
            self.results = [result for result in json.loads(known.read_text()) if result["step"] <= state.global_step]
            self.started -= self.results[-1]["seconds"] if self.results else 0.0

    def on_save(self, args, state, control, **kwargs):
        """Save the processor, of which the trainer has only the tokenizer."""
        self.processing_class.save_pretrained(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        last = state.global_step >= state.max_steps
        if state.global_step % self.exam.every and not last:
            return
        started = time.perf_counter()
        summary, trajectories = self.exam.evaluate(model, self.processing_class, self.pool, args.seed)
        write_jsonl(Path(args.output_dir, "exams", f"exam-{state.global_step:06d}.jsonl"), trajectories)
        duration = time.perf_counter() - started
        samples = state.global_step * self.samples_per_step
        samples = samples if self.num_samples is None else min(samples, self.num_samples)
        elapsed = time.perf_counter() - self.started
        self.results.append({"step": state.global_step, "samples": samples, "seconds": round(elapsed, 1), **summary})
        write_json(Path(args.output_dir, "exams", "results.json"), self.results, indent=1)
        listed = summary.get("admissible_action_ratio")
        called = summary.get("tool_call_ratio")
        losses = [f"loss {entry['loss']:.2f}" for entry in state.log_history if "loss" in entry]
        parts = [
            f"step {state.global_step:>4}",
            f"{samples} samples",
            *losses[-1:],
            f"success {summary['success_rate']:.1%} of {summary['episodes']} games",
            f"well-formed {summary['valid_action_ratio']:.1%}",
            *([] if called is None else [f"calls {called:.1%}"]),
            *([] if listed is None else [f"admissible {listed:.1%}"]),
            f"turns {summary['turns']:.1f}",
            f"exam {duration:.0f} s",
            f"elapsed {elapsed:.0f} s",
        ]
        print(joined(parts), flush=True)
        if failed := summary["error_rate"] + summary["lost_rate"]:
            print(f"{failed:.0%} of the exam's episodes ended in an environment error and do not count", flush=True)
        if self.exam.is_passed(summary):
            control.should_training_stop = True
