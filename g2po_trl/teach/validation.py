"""Validation during fine-tuning: episodes on tasks that were not shown; what limits a model that misses its target."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from g2po_trl.check.measure import spelled_words
from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.engines.transformers import TransformersEngine
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.prompts.images import ImageInputs
from g2po_trl.prompts.template import PromptTemplate
from g2po_trl.prompts.tokenization import ChatEncoder, get_tokenizer
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.runs.metrics import summarize
from g2po_trl.trajectory import Trajectory, write_jsonl
from g2po_trl.utils.forward_pass import evaluation_mode
from g2po_trl.utils.json import write_json
from g2po_trl.utils.options import option, require
from g2po_trl.utils.trl_compat import replaced

Processing = PreTrainedTokenizerBase | ProcessorMixin
FORMAT = 0.5  # of the completions; below it, the format is the limit


@dataclass
class TeachingArguments(Sampling):
    """Arguments of all recipes of teaching; each is a flag and a YAML key."""

    num_demonstrations: int = option("Maximum number of expert actions to train on.", 2048, within="[1, inf)")
    target_success: float = option("Success rate of a validation at which training ends.", 0.3, within="(0, 1]")
    validation_steps: int = option("Optimizer steps between validations.", 24, within="[1, inf)")
    num_validation_tasks: int | None = option("0: the taught tasks. None: a fifth.", None, within="[0, inf)")
    prompt: str = option("Wording of prompts.", "compact", choices=("full", "compact"))
    history_length: int = option("Past turns in a prompt.", 2, within="[0, inf)")
    max_turns: int = option("Turns of an episode.", 50, within="[1, inf)")
    cache_dir: str = option("Folder of tasks and SmolLM2.", "~/.cache/g2po_trl")
    overwrite: bool = option("Replace a model in output_dir that reached its target.", False)

    def split(self, rows: Sequence[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the tasks of demonstrations and the tasks of evaluations."""
        number = max(1, len(rows) // 5) if self.num_validation_tasks is None else self.num_validation_tasks
        require(number < len(rows), "num_validation_tasks", number, f"set it below the {len(rows)} training tasks")
        rows = list(rows)
        random.Random(f"{seed}-exam").shuffle(rows)  # this word keeps the split of recorded runs
        return (rows[number:], rows[:number]) if number else (rows, rows)


@dataclass
class SuccessEvaluation:
    """Evaluation episodes during fine-tuning, and the success rate that ends it."""

    environment_factory: Callable[[], Any]
    rows: Sequence[dict[str, Any]]  # tasks, each played once
    template: PromptTemplate  # as in the rollout
    options: TeachingArguments
    target_valid: float = 0.0  # fraction of well-formed completions that the target needs as well
    prompts: Mapping[str, Any] = field(default_factory=dict)  # further fields of the rollout's `PromptActor`
    chat_template_kwargs: dict[str, Any] | None = None
    limits: PoolLimits = field(default_factory=PoolLimits)

    def is_passed(self, summary: Mapping[str, Any]) -> bool:
        """Return whether the results of an evaluation reach the targets."""
        is_valid = summary["valid_action_ratio"] >= self.target_valid
        return is_valid and summary["success_rate"] >= self.options.target_success

    def evaluate(
        self, model: torch.nn.Module, processing_class: Processing, pool: EnvironmentPool, seed: int
    ) -> tuple[dict[str, Any], list[Trajectory]]:
        """Play all tasks in evaluation mode with a separate random state; return the summary and the trajectories."""
        with torch.random.fork_rng(), evaluation_mode(model), replaced(model.config, use_cache=True):
            torch.manual_seed(derived_seed(seed, 0))
            tokenizer = get_tokenizer(processing_class)
            engine = TransformersEngine.from_model(model, tokenizer, batch_tokens=16_384)
            engine.read_images(ImageInputs.of(processing_class, model))
            encode = ChatEncoder(processing_class, self.chat_template_kwargs)
            actor = PromptActor(engine, encode, self.template, self.options.history_length, **self.prompts)
            player = Player(pool, actor, EpisodeLimits(self.options.max_turns))
            trajectories, _ = player.play(self.rows, Sampling.of(self.options))
        return summarize(trajectories, [row.get("task_type") for row in self.rows]), trajectories


@dataclass
class SuccessEvalCallback(TrainerCallback):
    """Evaluates every `validation_steps` steps and at the end, and stops training at the target success rate.

    The episodes are written to output_dir/validations, the results to output_dir/validations/results.json.
    """

    validation: SuccessEvaluation
    processing_class: Processing
    pool: EnvironmentPool
    num_samples: int  # of the data set, times epochs
    results: list[dict[str, Any]] = field(default_factory=list)
    started: float = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, known = time.perf_counter(), Path(args.output_dir, "validations", "results.json")
        if state.global_step and known.is_file():
            self.results = [result for result in json.loads(known.read_text()) if result["step"] <= state.global_step]
            self.started -= self.results[-1]["seconds"] if self.results else 0.0

    def on_save(self, args, state, control, **kwargs):
        """Save the processor, of which the trainer has only the tokenizer."""
        self.processing_class.save_pretrained(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        step = state.global_step
        if step % self.validation.options.validation_steps and step < state.max_steps:
            return
        summary, trajectories = self.validation.evaluate(model, self.processing_class, self.pool, args.seed)
        folder = Path(args.output_dir, "validations")
        write_jsonl(folder / f"validation-{step:06d}.jsonl", trajectories)
        samples = step * args.per_device_train_batch_size * args.gradient_accumulation_steps
        samples = samples if args.max_steps > 0 else min(samples, self.num_samples)
        elapsed = time.perf_counter() - self.started
        self.results.append({"step": step, "samples": samples, "seconds": round(elapsed, 1), **summary})
        write_json(folder / "results.json", self.results, indent=1)
        losses = [f"loss {entry['loss']:.2f}" for entry in state.log_history if "loss" in entry]
        names = ("valid_action_ratio", "tool_call_ratio", "admissible_action_ratio")
        ratios = zip(("well-formed", "calls", "admissible"), map(summary.get, names))
        ratios = [f"{name} {ratio:.1%}" for name, ratio in ratios if ratio is not None]
        success = f"success {summary['success_rate']:.1%} of {summary['episodes']} games"
        ends = [f"turns {summary['turns']:.1f}", f"elapsed {elapsed:.0f} s"]
        print(" | ".join([f"step {step:>4}", f"{samples} samples", *losses[-1:], success, *ratios, *ends]), flush=True)
        if failed := summary["error_rate"] + summary["lost_rate"]:
            print(f"{failed:.0%} of its episodes ended in an environment error and do not count", flush=True)
        if self.validation.is_passed(summary):
            control.should_training_stop = True


def describe_limits(
    validation: SuccessEvaluation, last: Mapping[str, Any], shown: Sequence[Trajectory], model_name: str
) -> str:
    """Return what limits a model that missed its target: the format, calls of tools, or something else."""
    valid, steps = last["valid_action_ratio"], [step for episode in shown for step in episode.steps]
    calls, taught = last.get("tool_call_ratio"), [bool((step.response or {}).get("tool_calls")) for step in steps]
    has_format = f"{valid:.0%} of the completions have the format"
    if valid < FORMAT:
        return f"{has_format}, target {validation.target_valid:.0%}: teach longer, or raise max_completion_length."
    words = spelled_words(steps, model_name, with_actions=True)
    spelled = f" The tokenizer spells in pieces: {', '.join(words[0].facts['words'])}." if words else ""
    if calls is not None and calls * len(taught) < FORMAT * sum(taught):
        return f"{calls:.0%} of the completions call a tool: teach longer, or use a larger model.{spelled}"
    return f"{has_format}: use simpler actions, a larger model, or more episodes of the expert.{spelled}"
