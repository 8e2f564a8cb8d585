"""Cold start: supervised fine-tuning on an expert's actions until the model can learn from rewards.

Reinforcement learning needs a policy that writes completions in the required format and sometimes succeeds. A small
pretrained model does neither. A few hundred actions of an expert on training games teach SmolLM2-135M the format, and
to succeed in one game of three (docs/gpus.md).
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProcessorMixin,
    ProgressCallback,
)
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.stop_tokens import get_stop_token_ids
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.prompts.chat_template import get_tokenizer
from g2po_trl.prompts.images import ImageInputs, load_processing_class
from g2po_trl.prompts.template import PromptTemplate
from g2po_trl.runs.checkpoint import find_checkpoint
from g2po_trl.teach.dataset import build_dataset, validate_samples
from g2po_trl.teach.exam import SuccessEvalCallback, SuccessEvaluation
from g2po_trl.teach.images import COLUMN, ImageCollator
from g2po_trl.utils.adapters import on_language_part
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.forward_pass import without_cudnn_attention
from g2po_trl.utils.images import Picture
from g2po_trl.utils.json import write_json
from g2po_trl.utils.options import option
from g2po_trl.utils.show import wrapped

_UNSUPPORTED = {
    "load_in_4bit": "fine-tuning needs unquantised weights. Remove it; --use-peft saves memory.",
    "load_in_8bit": "fine-tuning needs unquantised weights. Remove it; --use-peft saves memory.",
    "packing": "each sample is a separate row. Remove it.",
    "push_to_hub": "the model is not uploaded. Remove it; use `hf upload` with its folder.",
}


class ProgressBar(ProgressCallback):
    """Transformers' bar without the dictionaries it prints: an evaluation prints a line instead."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


def teach(
    model: torch.nn.Module | str,
    args: SFTConfig,
    samples: Dataset,
    exam: SuccessEvaluation,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    peft_config: Any = None,
    checkpoint: str | None = None,
    pictures: Mapping[str, Picture] | None = None,
) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Fine-tune until the evaluation reaches its target or the samples are used up.

    Args:
        model: a model or its name.
        args: TRL's arguments.
        samples: prompts and completions, see `build_dataset`, or their token ids, see `build_rows`; the loss is on
            the completions.
        exam: the evaluation.
        processing_class: the model's tokenizer, or its processor if it reads images.
        peft_config: configuration of an adapter. `None`: full fine-tuning.
        checkpoint: folder to resume from.
        pictures: images of the samples by their hashes, see `build_rows`.

    Returns:
        The model with a merged adapter, and the summary of each evaluation with its `step` and `samples`.

    Raises:
        G2POError: if the samples do not match the rollout's prompts, see `validate_samples`, and for images with
            `padding_free`.
    """
    tokenizer = get_tokenizer(processing_class)
    if COLUMN in samples.column_names:
        if args.padding_free:
            raise G2POError("padding_free is True, and prompts have images, whose rows are padded: remove it")
        args.remove_unused_columns = False  # TRL's collator ignores the column, `ImageCollator` reads it
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=samples,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if (inputs := ImageInputs.of(processing_class, trained)) is not None:
        trainer.data_collator = ImageCollator(trainer.data_collator, inputs, pictures or {})
    if "input_ids" not in samples.column_names:
        stop_token_ids = get_stop_token_ids(tokenizer, trained)
        validate_samples(samples, trainer.train_dataset, tokenizer, exam.template, stop_token_ids, args.max_length)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    most = int(len(samples) * args.num_train_epochs) if args.max_steps <= 0 else None
    with EnvironmentPool(exam.environment_factory, exam.limits) as pool:
        callback = SuccessEvalCallback(exam, processing_class, pool, per_step, most)
        for theirs in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            trainer.remove_callback(theirs)
        if not args.disable_tqdm:
            trainer.add_callback(ProgressBar())
        trainer.add_callback(callback)
        with without_cudnn_attention():
            trainer.train(resume_from_checkpoint=checkpoint)
    if peft_config is not None:
        trained = trained.merge_and_unload()
    return trained, callback.results


@dataclass
class TeachingArguments(Sampling):
    """Arguments of all cold-start recipes; each is a flag and a YAML key."""

    num_demonstrations: int = option("Maximum number of expert actions to train on.", 768, within="[1, inf)")
    target_success: float = option("Success rate of an exam at which training ends.", 0.3, within="(0, 1]")
    exam_steps: int = option("Optimizer steps between two exams.", 24, within="[1, inf)")
    num_exam_tasks: int = option("Tasks of an exam, excluded from the demonstrations.", 24, within="[1, inf)")
    prompt: str = option("Wording of prompts.", "compact", choices=("full", "compact"))
    history_length: int = option("Past turns in a prompt.", 2, within="[0, inf)")
    max_turns: int = option("Turns of an exam's episode.", 15, within="[1, inf)")
    max_completion_length: int = option("Maximum tokens of a completion in an exam.", 32, within="[1, inf)")
    cache_dir: str = option("Folder of tasks and SmolLM2.", "~/.cache/g2po_trl")
    overwrite: bool = option("Replace a model in output_dir that reached its target.", False)

    def split(self, rows: Sequence[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the tasks of demonstrations and the tasks of evaluations.

        Raises:
            G2POError: if there are too few tasks.
        """
        if not 0 < self.num_exam_tasks < len(rows):
            raise G2POError(
                f"num_exam_tasks is {self.num_exam_tasks}: set it above 0 and below the {len(rows)} training tasks"
            )
        rows = list(rows)
        random.Random(f"{seed}-exam").shuffle(rows)
        return rows[self.num_exam_tasks :], rows[: self.num_exam_tasks]

    def exam(self, environment_factory: Callable[[], Any], rows: Sequence[dict[str, Any]], template: PromptTemplate):
        """Return the evaluation that these arguments describe."""
        return SuccessEvaluation(
            environment_factory,
            rows,
            template,
            self.history_length,
            self.max_turns,
            Sampling.of(self),
            self.target_success,
            self.exam_steps,
        )


def load_base_model(
    script_args: TeachingArguments, args: SFTConfig, model_args: ModelConfig, default: Callable[[str], Path]
) -> tuple[str, PreTrainedTokenizerBase | ProcessorMixin]:
    """Return the base model, a folder or a Hub id, and its tokenizer, or its processor if it reads images.

    Called first, so that invalid options fail before any work. `default` returns the folder of the model without
    `model_name_or_path`, given `cache_dir`.

    Raises:
        G2POError: for unsupported options, and an output_dir with another fine-tuning, unless it is complete and
            missed its target.
        OSError, ImportError: if the model is not available.
    """
    for name, meaning in _UNSUPPORTED.items():
        if getattr(model_args if hasattr(model_args, name) else args, name):
            raise G2POError(f"{name} is set: {meaning}")
    if args.world_size > 1:
        raise G2POError(f"world_size is {args.world_size}: fine-tuning runs in one process, on one device")
    if Path(args.output_dir, "run.json").is_file():
        raise G2POError(f"output_dir is {args.output_dir!r}, which holds a training run: pass another --output-dir")
    taught = Path(args.output_dir, "teaching.json")
    if taught.is_file() and json.loads(taught.read_text()).get("reached", True) and not script_args.overwrite:
        raise G2POError(
            f"output_dir is {args.output_dir!r}, which holds a taught model that reached its target: pass --overwrite "
            "to replace it, or another --output-dir"
        )
    left = find_checkpoint("auto", args.output_dir)
    resumes = find_checkpoint(args.resume_from_checkpoint, args.output_dir) is not None
    if left and not resumes and not script_args.overwrite:
        raise G2POError(
            f"output_dir is {args.output_dir!r}, which holds {Path(left).name} of a teaching that was stopped: pass "
            "--resume-from-checkpoint auto to go on, --overwrite to begin again, or another --output-dir"
        )
    name = model_args.model_name_or_path or str(default(script_args.cache_dir))
    return name, load_processing_class(name, revision=model_args.model_revision)


def draw_samples(
    script_args: TeachingArguments, shown: Sequence[Demonstration], exam: SuccessEvaluation, seed: int
) -> Dataset:
    """Return the samples of `num_demonstrations` demonstrations, drawn at random.

    Raises:
        G2POError: if there are fewer.
    """
    if len(shown) < script_args.num_demonstrations:
        raise G2POError(
            f"num_demonstrations is {script_args.num_demonstrations}, and the training tasks give {len(shown)}: "
            "set it lower, or take more tasks"
        )
    drawn = random.Random(seed).sample(list(shown), script_args.num_demonstrations)
    print(f"{len(drawn)} expert answers; exam: {len(exam.rows)} tasks that are not taught", flush=True)
    return build_dataset(drawn, exam.template, exam.history_length)


def run_teaching(
    script_args: TeachingArguments,
    args: SFTConfig,
    model_args: ModelConfig,
    base_model: tuple[str, PreTrainedTokenizerBase | ProcessorMixin],
    samples: Dataset,
    exam: SuccessEvaluation,
    describe_limits: Callable[..., str] | None = None,
    pictures: Mapping[str, Picture] | None = None,
) -> dict[str, Any]:
    """Fine-tune, save the model and its evaluations, and return the last one, with `reached`: whether the target was.

    Args:
        script_args: the recipe's arguments.
        args: TRL's arguments.
        model_args: the model's arguments.
        base_model: see `load_base_model`.
        samples: of `teach`.
        exam: the evaluation.
        describe_limits: returns what limits a model that missed the target, from the model, its tokenizer or
            processor, the seed and the last evaluation.
        pictures: of `teach`.

    Raises:
        G2POError: if the chat template does not fit.
    """
    name, processing_class = base_model
    output, checkpoint = Path(args.output_dir), find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    (output / "teaching.json").unlink(missing_ok=True)  # marks a complete fine-tuning
    if checkpoint is None:
        _delete_checkpoints(output)
        shutil.rmtree(output / "exams", ignore_errors=True)
    else:
        print(f"Resuming from {checkpoint}", flush=True)
    if (adapter := get_peft_config(model_args)) is not None:
        adapter = on_language_part(adapter, name, revision=model_args.model_revision)
    model, results = teach(name, args, samples, exam, processing_class, adapter, checkpoint, pictures)
    if args.bf16:  # the training precision, so that vLLM also runs in bfloat16
        model = model.to(torch.bfloat16)
    model.save_pretrained(output)
    processing_class.save_pretrained(output)
    last = results[-1]
    about = {"model": model_args.model_name_or_path or Path(name).name, "seed": args.seed, "seconds": last["seconds"]}
    source = Path(name, "source.json")  # written with SmolLM2's weights
    about |= {"source": json.loads(source.read_text())} if source.is_file() else {}
    reached = exam.is_passed(last)
    write_json(output / "teaching.json", {**about, "reached": reached, "exams": results}, indent=1)
    _delete_checkpoints(output)
    said = (
        f"{last['samples']} samples, {last['seconds']:.0f} s, success {last['success_rate']:.1%}: target of "
        f"{exam.target:.0%} {'reached' if reached else 'not reached'}. The model is in {args.output_dir}"
    )
    print(wrapped(said))
    if not reached and describe_limits is not None:
        print(wrapped(describe_limits(model, processing_class, args.seed, last)), flush=True)
    return {**last, "reached": reached}


def _delete_checkpoints(output: Path) -> None:
    while left := find_checkpoint("auto", output):
        shutil.rmtree(left)
