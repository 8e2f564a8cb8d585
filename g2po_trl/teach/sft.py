"""Supervised fine-tuning on an expert's actions until the model writes the format and sometimes succeeds."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from g2po_trl.engines.stop_tokens import get_stop_token_ids_of_checkpoint
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.prompts.images import ImageInputs, load_processing_class
from g2po_trl.prompts.tokenization import ChatEncoder, get_tokenizer
from g2po_trl.runs.checkpoint import find_checkpoint
from g2po_trl.runs.ownership import held
from g2po_trl.teach.demonstrations import IMAGES, state_rows
from g2po_trl.trajectory import Trajectory
from g2po_trl.utils.adapters import on_language_part
from g2po_trl.utils.forward_pass import without_cudnn_attention
from g2po_trl.utils.images import Picture
from g2po_trl.utils.json import write_json
from g2po_trl.utils.options import require
from g2po_trl.utils.show import wrapped

from .validation import Processing, SuccessEvalCallback, SuccessEvaluation, TeachingArguments, describe_limits

BaseModel = tuple[str, Processing]  # a folder or a Hub id, and what reads its prompts
_UNSUPPORTED = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "fine-tuning needs whole weights, --use-peft saves memory"),
    "packing": "each sample is a separate row, leave it out",
    "push_to_hub": "the model is not uploaded, use `hf upload` with its folder",
}


class ProgressBar(ProgressCallback):
    """Transformers' bar without the dictionaries it prints: an evaluation prints a line instead."""

    on_log = TrainerCallback.on_log


@dataclass
class ImageCollator:
    """Make batches of samples with another collator, and add the model's inputs for their images."""

    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    inputs: ImageInputs
    pictures: Mapping[str, Picture]  # by their hashes, which samples have in `IMAGES`

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        images = [[self.pictures[name] for name in sample.pop(IMAGES, ())] for sample in samples]
        batch = self.collate(samples)
        return {**batch, **self.inputs(batch["input_ids"], images)}


def teach(
    model: torch.nn.Module | str,
    args: SFTConfig,
    samples: Dataset,
    validation: SuccessEvaluation,
    processing_class: Processing,
    peft_config: Any = None,
    checkpoint: str | None = None,
    shown: Iterable[Trajectory] = (),
) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Fine-tune until the validation reaches its target or the samples (`build_rows`, `state_rows`) are used up.

    `shown` are the demonstrations, for samples with images. Return the model, with a merged adapter, and the summary
    of each validation with its `step` and `samples`.
    """
    longest = max(map(len, samples["input_ids"]))
    remedy = f"a sample has {longest} tokens: set it to null"
    require(args.max_length is None or longest <= args.max_length, "max_length", args.max_length, remedy)
    if IMAGES in samples.column_names:
        require(not args.padding_free, "padding_free", True, "prompts have images, whose rows are padded: remove it")
        args.remove_unused_columns = False  # TRL's collator ignores the column, `ImageCollator` reads it
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=samples,
        processing_class=get_tokenizer(processing_class),
        peft_config=peft_config,
    )
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if (inputs := ImageInputs.of(processing_class, trained)) is not None:
        pictures = {image: image for episode in shown for step in episode.steps for image in step.shown_images}
        trainer.data_collator = ImageCollator(trainer.data_collator, inputs, pictures)
    with EnvironmentPool(validation.environment_factory, validation.limits) as pool:
        callback = SuccessEvalCallback(validation, processing_class, pool, int(len(samples) * args.num_train_epochs))
        for default in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            trainer.remove_callback(default)
        for ours in (*([] if args.disable_tqdm else [ProgressBar()]), callback):
            trainer.add_callback(ours)
        with without_cudnn_attention():
            trainer.train(resume_from_checkpoint=checkpoint)
    return trained if peft_config is None else trained.merge_and_unload(), callback.results


def load_base_model(
    script_args: TeachingArguments, args: SFTConfig, model_args: ModelConfig, default: Callable[[str], str | Path]
) -> BaseModel:
    """Return the base model, and its tokenizer, or its processor if it reads images.

    Called first, so that invalid options and an occupied output_dir fail before any work. `default` returns the folder
    of the model without `model_name_or_path`, from `cache_dir`.
    """
    for name, remedy in _UNSUPPORTED.items():
        value = getattr(model_args if hasattr(model_args, name) else args, name)
        require(not value, name, value, remedy)
    require(args.world_size == 1, "world_size", args.world_size, "fine-tuning runs in one process, on one device")
    output = Path(args.output_dir)
    taught, left = output / "teaching.json", find_checkpoint("auto", args.output_dir)
    reached = taught.is_file() and json.loads(taught.read_text()).get("reached", True)
    resumes = find_checkpoint(args.resume_from_checkpoint, args.output_dir) is not None
    kept = not script_args.overwrite
    for is_taken, remedy in (
        ((output / "run.json").is_file(), "a training run: pass another --output-dir"),
        (reached and kept, "a taught model that reached its target: pass --overwrite or another --output-dir"),
        (left and kept and not resumes, "a stopped teaching: pass --resume-from-checkpoint auto or --overwrite"),
    ):
        require(not is_taken, "output_dir", args.output_dir, f"it holds {remedy}")
    name = model_args.model_name_or_path or str(default(script_args.cache_dir))
    return name, load_processing_class(name, revision=model_args.model_revision)


def draw_samples(shown: Sequence[Any], validation: SuccessEvaluation, base_model: BaseModel, seed: int) -> Dataset:
    """Return the samples of `num_demonstrations` states with an expert's action, drawn at random."""
    number, (name, processing_class) = validation.options.num_demonstrations, base_model
    require(number <= len(shown), "num_demonstrations", number, f"set it to at most {len(shown)}, or take more tasks")
    print(f"{number} expert answers; validation: {len(validation.rows)} tasks", flush=True)
    stops = get_stop_token_ids_of_checkpoint(get_tokenizer(processing_class), name)
    drawn = random.Random(seed).sample(list(shown), number)
    encode = ChatEncoder(processing_class)
    rows = state_rows(drawn, validation.template, validation.options.history_length, encode, stops)
    return Dataset.from_list(list(rows))


def teach_states(arguments: tuple[Any, ...], default: Callable[[str], Any], lesson: Callable) -> None:
    """Teach an expert's actions in states of training tasks.

    `lesson`: options and seed -> environment factory, tasks, prompt template, and a function from tasks to states.
    """
    options, args, model_args = arguments
    with held(args.output_dir, "output_dir"):
        base_model = load_base_model(options, args, model_args, default)
        factory, rows, template, demonstrate = lesson(options, args.seed)
        to_show, to_examine = options.split(rows, args.seed)
        validation = SuccessEvaluation(factory, to_examine, template, options)
        samples = draw_samples(demonstrate(to_show), validation, base_model, args.seed)
        run_teaching(args, model_args, base_model, samples, validation)


def run_teaching(
    args: SFTConfig,
    model_args: ModelConfig,
    base_model: BaseModel,
    samples: Dataset,
    validation: SuccessEvaluation,
    shown: Sequence[Trajectory] = (),
) -> dict[str, Any]:
    """Fine-tune, save the model and its evaluations; return the last one, with `reached`: whether the target was."""
    name, processing_class = base_model
    output, checkpoint = Path(args.output_dir), find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    (output / "teaching.json").unlink(missing_ok=True)  # marks a complete fine-tuning
    if checkpoint is None:
        _delete_checkpoints(output)
        shutil.rmtree(output / "validations", ignore_errors=True)
    else:
        print(f"Resuming from {checkpoint}", flush=True)
    if (adapter := get_peft_config(model_args)) is not None:
        adapter = on_language_part(adapter, name, revision=model_args.model_revision)
    model, results = teach(name, args, samples, validation, processing_class, adapter, checkpoint, shown)
    if args.bf16:  # the training precision, so that vLLM also runs in bfloat16
        model = model.to(torch.bfloat16)
    model.save_pretrained(output)
    processing_class.save_pretrained(output)
    last, source = results[-1], Path(name, "source.json")  # written with SmolLM2's weights
    reached = validation.is_passed(last)
    about = {"model": model_args.model_name_or_path or Path(name).name, "seed": args.seed, "seconds": last["seconds"]}
    about |= {"source": json.loads(source.read_text())} if source.is_file() else {}
    write_json(output / "teaching.json", {**about, "reached": reached, "validations": results}, indent=1)
    _delete_checkpoints(output)
    target = f"target of {validation.options.target_success:.0%} {'' if reached else 'not '}reached"
    result = f"{last['samples']} samples, {last['seconds']:.0f} s, success {last['success_rate']:.1%}"
    print(wrapped(f"{result}: {target}. The model is in {args.output_dir}"))
    if not reached and shown:
        print(wrapped(describe_limits(validation, last, shown, name)), flush=True)
    return {**last, "reached": reached}


def _delete_checkpoints(output: Path) -> None:
    while left := find_checkpoint("auto", output):
        shutil.rmtree(left)
