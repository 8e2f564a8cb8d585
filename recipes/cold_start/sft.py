"""A cold start: a language model is shown an expert's answers until it plays well enough to learn from rewards.

Reinforcement learning needs a policy that writes replies in the required format and wins now and then. A small
pretrained model does neither. Some hundred single answers of an expert on training games teach SmolLM2-135M the
format, and to win one game in three (docs/pretrained.md). What is best is then left for it to find out.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from g2po_envs.tiny.demonstration import Demonstration
from g2po_recipes.cold_start.dataset import as_dataset, check_lessons
from g2po_recipes.cold_start.smollm2 import NAME as SMOLLM2
from g2po_recipes.cold_start.smollm2 import smollm2_path
from g2po_trl.cli.recipe import parse_arguments
from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.engines.transformers import TransformersEngine, ends_of_turn
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.prompts.template import PromptTemplate
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.runs.checkpoint import find_checkpoint
from g2po_trl.runs.summary import summarize
from g2po_trl.trajectory import Trajectory, write_jsonl
from g2po_trl.utils.json import write_json
from g2po_trl.utils.sdpa import without_cudnn_attention

_NOT_HERE = {
    "load_in_4bit": "teaching takes whole weights. Leave it out; --use_peft saves memory.",
    "load_in_8bit": "teaching takes whole weights. Leave it out; --use_peft saves memory.",
    "packing": "a lesson has a row of its own. Leave it out.",
    "push_to_hub": "a start is not published. Leave it out; `hf upload` takes its folder.",
}


@dataclass
class Exam:
    """The games by which a start is judged, and when to stop.

    Args:
        environment_factory, rows: whose episodes are played, each once.
        template, history_length, max_turns, sampling: how.
        target: share of them to win; teaching ends when it is reached.
        every: optimizer steps between two exams.
    """

    environment_factory: Callable[[], Any]
    rows: Sequence[dict[str, Any]]
    template: PromptTemplate
    history_length: int
    max_turns: int
    sampling: Sampling
    target: float
    every: int
    batch_tokens: int = 16_384

    def __post_init__(self):
        if not 0 < self.target <= 1:
            raise ValueError(f"target_success is {self.target!r}: set it above 0 and at most to 1")
        if self.every < 1:
            raise ValueError(f"exam_steps is {self.every!r}: set it to at least 1")

    def sit(
        self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool, seed: int
    ) -> tuple[dict[str, Any], list[Trajectory]]:
        """Play, in evaluation mode and with random numbers of its own: the summary, and all episodes."""
        was_training, cache = model.training, model.config.use_cache
        model.eval()
        model.config.use_cache = True
        try:
            with torch.random.fork_rng():
                torch.manual_seed(derived_seed(seed, 0))
                engine = TransformersEngine.from_model(model, tokenizer, batch_tokens=self.batch_tokens)
                actor = PromptActor.from_engine(engine, self.template, history_length=self.history_length)
                trajectories, _ = Player(pool, actor, self.max_turns).play(self.rows, self.sampling)
        finally:
            model.config.use_cache = cache
            model.train(was_training)
        return summarize(trajectories, [row.get("task_type") for row in self.rows]), trajectories


class ExamCallback(TrainerCallback):
    """Holds an exam every so many steps and at the end, says how it went, and ends what has reached its target.

    The episodes are written to output_dir/exams, the results to output_dir/exams/results.json.

    Args:
        num_samples: at most, where the number of epochs is what ends teaching.
    """

    def __init__(
        self,
        exam: Exam,
        tokenizer: PreTrainedTokenizerBase,
        pool: EnvironmentPool,
        samples_per_step: int,
        num_samples: int | None,
    ):
        self.exam, self.tokenizer, self.pool = exam, tokenizer, pool
        self.samples_per_step, self.num_samples = samples_per_step, num_samples
        self.results: list[dict[str, Any]] = []
        self.started = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, known = time.perf_counter(), Path(args.output_dir, "exams", "results.json")
        if state.global_step and known.is_file():
            self.results = [one for one in json.loads(known.read_text()) if one["step"] <= state.global_step]
            self.started -= self.results[-1]["seconds"] if self.results else 0.0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        last = state.global_step >= state.max_steps
        if state.global_step % self.exam.every and not last:
            return
        began = time.perf_counter()
        summary, trajectories = self.exam.sit(model, self.tokenizer, self.pool, args.seed)
        write_jsonl(Path(args.output_dir, "exams", f"exam-{state.global_step:06d}.jsonl"), trajectories)
        took = time.perf_counter() - began
        samples = state.global_step * self.samples_per_step
        samples = samples if self.num_samples is None else min(samples, self.num_samples)
        elapsed = time.perf_counter() - self.started
        self.results.append({"step": state.global_step, "samples": samples, "seconds": round(elapsed, 1), **summary})
        write_json(Path(args.output_dir, "exams", "results.json"), self.results, indent=1)
        print(
            f"step {state.global_step:>4} | {samples} samples | success {summary['success_rate']:.1%} of "
            f"{summary['episodes']} games | well-formed {summary['valid_action_ratio']:.1%} | "
            f"turns {summary['turns']:.1f} | exam {took:.0f} s | elapsed {elapsed:.0f} s",
            flush=True,
        )
        if failed := summary["error_rate"] + summary["lost_rate"]:
            print(f"{failed:.0%} of the exam's episodes ended in an environment error and do not count", flush=True)
        if summary["success_rate"] >= self.exam.target:
            control.should_training_stop = True


def teach(
    model: torch.nn.Module | str,
    args: SFTConfig,
    lessons: Dataset,
    exam: Exam,
    processing_class: PreTrainedTokenizerBase,
    peft_config: Any = None,
    checkpoint: str | None = None,
) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Supervised fine-tuning until the exam is passed or the lessons are over.

    Args:
        lessons: prompt and completion, see `as_dataset`; the loss is on the completion.
        checkpoint: a folder from which to go on.

    Returns:
        The model, an adapter merged into it; and every exam's summary with its `step` and `samples`.

    Raises:
        ValueError: when what is trained is not what is played, see `check_lessons`.
    """
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=lessons,
        processing_class=processing_class,
        peft_config=peft_config,
    )
    taught = trainer.accelerator.unwrap_model(trainer.model)
    ends = ends_of_turn(processing_class, taught)
    check_lessons(lessons, trainer.train_dataset, processing_class, exam.template, ends, args.max_length)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    most = int(len(lessons) * args.num_train_epochs) if args.max_steps <= 0 else None
    with EnvironmentPool(exam.environment_factory) as pool:
        callback = ExamCallback(exam, processing_class, pool, per_step, most)
        trainer.add_callback(callback)
        with without_cudnn_attention():
            trainer.train(resume_from_checkpoint=checkpoint)
    if peft_config is not None:
        taught = taught.merge_and_unload()
    return taught, callback.results


@dataclass
class TeachingArguments:
    """What the recipes that teach have in common. Any of these is a flag and a YAML key."""

    num_demonstrations: int = field(default=768, metadata={"help": "Answers of the expert to show, at most."})
    target_success: float = field(default=0.3, metadata={"help": "Share of the exam's tasks to win; then it ends."})
    exam_steps: int = field(default=24, metadata={"help": "Optimizer steps between two exams."})
    num_exam_tasks: int = field(default=24, metadata={"help": "Training tasks of an exam; none of them was shown."})
    prompt: str = field(default="compact", metadata={"help": "'full' or 'compact'."})
    history_length: int = field(default=2, metadata={"help": "Past turns in a prompt."})
    max_turns: int = field(default=15, metadata={"help": "Turns of an exam's episode."})
    max_completion_length: int = field(default=32, metadata={"help": "Tokens of an exam's reply."})
    temperature: float = field(default=1.0, metadata={"help": "Of an exam's replies."})
    cache_dir: str = field(default="~/.cache/g2po_trl", metadata={"help": "Where tasks and SmolLM2 are kept."})

    def __post_init__(self):
        for name in ("num_demonstrations", "num_exam_tasks", "max_turns", "max_completion_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to at least 1")
        for name in ("history_length", "temperature"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to at least 0")

    def split(self, rows: Sequence[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Tasks to show, and tasks of the exam.

        Raises:
            ValueError: when there are too few.
        """
        if not 0 < self.num_exam_tasks < len(rows):
            raise ValueError(
                f"num_exam_tasks is {self.num_exam_tasks}: set it above 0 and below the {len(rows)} training tasks"
            )
        rows = list(rows)
        random.Random(f"{seed}-exam").shuffle(rows)
        return rows[self.num_exam_tasks :], rows[: self.num_exam_tasks]

    def exam(self, environment_factory: Callable[[], Any], rows: Sequence[dict[str, Any]], template: PromptTemplate):
        """The exam that these arguments ask for."""
        return Exam(
            environment_factory,
            rows,
            template,
            self.history_length,
            self.max_turns,
            Sampling(self.temperature, max_tokens=self.max_completion_length),
            self.target_success,
            self.exam_steps,
        )


def parse_teaching_arguments(
    script_type: type[TeachingArguments], default_config: Path, prompts: Collection[str]
) -> tuple[TeachingArguments, SFTConfig, ModelConfig]:
    """Command line and YAML of a recipe that teaches.

    Args:
        prompts: those that `prompt` may name.

    Raises:
        SystemExit: after `--help`, and for what is not known or has no such value.
    """
    try:
        script_args, args, model_args = parse_arguments((script_type, SFTConfig, ModelConfig), default_config)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if script_args.prompt not in prompts:
        raise SystemExit(f"prompt is {script_args.prompt!r}: choose one of {', '.join(prompts)}")
    return script_args, args, model_args


def model_to_teach(
    script_args: TeachingArguments, args: SFTConfig, model_args: ModelConfig
) -> tuple[str, PreTrainedTokenizerBase]:
    """What is taught, a folder or a Hub id, and its tokenizer; asked for before anything else takes time.

    Raises:
        ValueError: for options that have no meaning here, and an output_dir with another teaching's checkpoints.
        OSError, ImportError: when no model is to be had.
    """
    for name, meaning in _NOT_HERE.items():
        if getattr(model_args if hasattr(model_args, name) else args, name):
            raise ValueError(f"{name} is set: {meaning}")
    if args.world_size > 1:
        raise ValueError(f"world_size is {args.world_size}: teaching runs in one process, on one device")
    if Path(args.output_dir, "run.json").is_file():
        raise ValueError(f"output_dir is {args.output_dir!r}, which holds a training run: pass another --output_dir")
    left = find_checkpoint("auto", args.output_dir)
    if left and find_checkpoint(args.resume_from_checkpoint, args.output_dir) is None:
        raise ValueError(
            f"output_dir is {args.output_dir!r}, which holds {Path(left).name} of a teaching that was stopped: pass "
            "--resume_from_checkpoint auto to go on, or another --output_dir"
        )
    name = model_args.model_name_or_path or str(smollm2_path(script_args.cache_dir))
    return name, AutoTokenizer.from_pretrained(name, revision=model_args.model_revision)


def run_teaching(
    script_args: TeachingArguments,
    args: SFTConfig,
    model_args: ModelConfig,
    to_teach: tuple[str, PreTrainedTokenizerBase],
    shown: Sequence[Demonstration],
    exam: Exam,
) -> None:
    """What a recipe does with its demonstrations: draw some, teach, save the model and how it went.

    Args:
        to_teach: see `model_to_teach`.

    Raises:
        ValueError: when there are fewer than `num_demonstrations`, or the model's template does not suit.
    """
    name, tokenizer = to_teach
    if len(shown) < script_args.num_demonstrations:
        raise ValueError(
            f"num_demonstrations is {script_args.num_demonstrations}, and the training tasks give {len(shown)}: "
            "set it lower, or take more tasks"
        )
    drawn = random.Random(args.seed).sample(list(shown), script_args.num_demonstrations)
    lessons = as_dataset(drawn, exam.template, exam.history_length)
    print(f"{len(lessons)} answers of the expert; exam: {len(exam.rows)} tasks of which none was shown", flush=True)

    output, checkpoint = Path(args.output_dir), find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    (output / "teaching.json").unlink(missing_ok=True)  # what says that a start is complete
    if checkpoint is None:
        shutil.rmtree(output / "exams", ignore_errors=True)
    else:
        print(f"Resuming from {checkpoint}", flush=True)
    args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    disable_progress_bar()  # of each file transformers writes
    model, results = teach(name, args, lessons, exam, tokenizer, get_peft_config(model_args), checkpoint)
    if args.bf16:  # what passed through it was; vLLM then runs in bfloat16, too
        model = model.to(torch.bfloat16)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    last = results[-1]
    about = {"model": model_args.model_name_or_path or SMOLLM2, "seed": args.seed, "seconds": last["seconds"]}
    source = Path(name, "source.json")  # where SmolLM2's weights are from
    about |= {"source": json.loads(source.read_text())} if source.is_file() else {}
    write_json(output / "teaching.json", {**about, "exams": results}, indent=1)
    while left := find_checkpoint("auto", output):
        shutil.rmtree(left)
    reached = "reached" if last["success_rate"] >= exam.target else "not reached"
    print(
        f"{last['samples']} samples, {last['seconds']:.0f} s, success {last['success_rate']:.1%}: target of "
        f"{exam.target:.0%} {reached}. The model is in {args.output_dir}"
    )
