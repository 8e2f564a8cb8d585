"""Helpers of recipes: parse arguments; then train, evaluate, save and publish with the recipe's trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig

from ..config import G2POConfig
from ..config_validation import inherited
from ..prompts.images import load_processing_class
from ..runs.checkpoint import find_checkpoint
from ..runs.hub import HubError
from ..runs.ownership import check_free
from ..runs.summary import REPORT, at_other_temperatures, before_and_after, format_table
from ..trainer import G2POTrainer
from ..utils.errors import G2POError
from ..utils.options import switches_of, without_effect
from .launch import VIEW
from .live_view import LiveView
from .parser import parse
from .preflight import check_files_and_packages
from .recipe_files import find_config

EXIT_NOT_PUSHED = 3
Keys = Mapping[str, Any]


def cpu_defaults() -> dict[str, Any]:
    """Return values for fields whose defaults in TRL are for GPUs; empty if there is one."""
    if torch.accelerator.is_available():
        return {}
    return {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}


def parse_arguments(
    types: Sequence[type],
    default_config: Path | Callable[[Keys], Keys] | None = None,
    defaults: Keys | Callable[[Keys], Keys] | None = None,
    argv: Sequence[str] | None = None,
    configs: str = "",
) -> tuple[Any, ...]:
    """Return a recipe's arguments: flags, then the file of `--config`, then `defaults`, then the fields' defaults.

    A `ModelConfig` among the types sets `model_init_kwargs` of the trainer's arguments, see `use_model_arguments`.

    Args:
        types: dataclasses, e.g. `(ScriptArguments, G2POConfig, ModelConfig)`; one object of each is returned.
        default_config: the YAML file without `--config`, or a function that returns its keys from the flags' values.
        defaults: field -> value, or a function that returns it from the values that flags and YAML file set.
        argv: the arguments. Default: the command line.
        configs: folder of recipes/ whose files `--config` takes by name. Default: the folder of `default_config`.

    Raises:
        SystemExit: after `--help`, and for an unknown argument or an invalid value.
        G2POError: if a file, a model's folder or a package is missing.
    """
    *parsed, given = parse(types, argv, **parser_options(default_config, defaults, configs))
    values = {name: value for one in parsed for name, value in vars(one).items()}
    # A switch that is given as off is a decision: `--use-vllm false` with the configuration of a GPU.
    switches = given | ({"engine"} if "use_vllm" in given else set())
    needs = {name: needed for name, needed in inherited("needs").items() if switches.isdisjoint(switches_of(needed))}
    for sentence in without_effect(sorted(given), values, needs):
        raise G2POError(f"{sentence}: add it, or leave the option out")
    check_files_and_packages(values)
    model_args = [one for one in parsed if isinstance(one, ModelConfig)]
    for one in parsed if model_args else ():
        if hasattr(one, "model_init_kwargs"):
            use_model_arguments(one, *model_args)
    disable_progress_bar()  # transformers shows one for each file that it reads or writes
    return tuple(parsed)


def parser_options(
    default_config: Path | Callable[[Keys], Keys] | None = None,
    defaults: Keys | Callable[[Keys], Keys] | None = None,
    configs: str = "",
) -> dict[str, Any]:
    """Return the options of `parser.read` for a recipe's command line."""
    if isinstance(default_config, Path):
        configs = configs or default_config.parent.name
    return {
        "find_config": partial(find_config, kind=configs),
        "default_config": default_config,
        "defaults": lambda given: {**cpu_defaults(), **(defaults(given) if callable(defaults) else defaults or {})},
    }


def use_model_arguments(args: G2POConfig, model_args: ModelConfig) -> None:
    """Set `model_init_kwargs` from TRL's `ModelConfig`; entries that are already set stay."""
    args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }


def starting_point(args: G2POConfig) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` names, or `None` to start from scratch.

    Call it before tasks and model are loaded.

    Raises:
        G2POError: if the checkpoint does not exist, or output_dir holds another run.
    """
    check_free(args.output_dir, args.resume_from_checkpoint, args.overwrite)
    return find_checkpoint(args.resume_from_checkpoint, args.output_dir)


def tokenizer_with_template(model_args: ModelConfig, file: str | Path) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Return the model's tokenizer, or its processor if it reads images, with the Jinja chat template of a file."""
    sides = {"padding_side": "left", "truncation_side": "left"}  # as TRL loads it
    processing_class = load_processing_class(model_args.model_name_or_path, model_args.model_revision, **sides)
    processing_class.chat_template = Path(file).read_text(encoding="utf-8")
    return processing_class


def kept_path(path: str) -> str:
    """Return a path for run.json: below `~` as it is, else absolute."""
    return path if path.startswith("~") else str(Path(path).absolute())


class _ReportBefore(TrainerCallback):
    """Evaluation of the reported panel when training begins; sharded models cannot generate before."""

    def __init__(self, trainer: G2POTrainer, dataset: Dataset):
        self.trainer, self.dataset = trainer, dataset

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.trainer.evaluate(self.dataset, metric_key_prefix=REPORT)


def run_recipe(
    trainer: G2POTrainer,
    checkpoint: str | None,
    settings: Mapping[str, Any],
    dataset_name: str | None = None,
    report_dataset: Dataset | None = None,
    panel: str = "Held-out tasks",
) -> None:
    """Train, evaluate, save the model and its card, and print success before and after training.

    Args:
        trainer: the recipe's trainer.
        checkpoint: folder of the checkpoint to resume from. `None`: start from scratch.
        settings: the recipe's settings, written to output_dir/run.json with the trainer's.
        dataset_name: for the model card.
        report_dataset: the reported panel, played before and after training. Required with `load_best_model_at_end`,
            which chooses a checkpoint by its success on `eval_dataset`: the maximum of several evaluations is biased
            upwards. `None`: the trainer's `eval_dataset`.
        panel: name of the reported panel in the table.

    Raises:
        G2POError: if there is no panel to report, or the checkpoint would be chosen on it.
        SystemExit: with code 3 if the model was trained but not pushed to the Hub, 130 after Ctrl-C.
    """
    args = trainer.args
    if args.load_best_model_at_end and report_dataset is None:
        raise G2POError(
            "load_best_model_at_end is True and report_dataset is None: pass another evaluation set to report on"
        )
    if report_dataset is None and not trainer.eval_dataset:
        raise G2POError(
            f"report_dataset is None and the trainer's eval_dataset is {trainer.eval_dataset!r}: pass one, the "
            "evaluation set to play after training; or call trainer.train() instead"
        )
    trainer.folder.settings = settings
    # Trackio ends its run with the training. One of the same name goes on: the last evaluation belongs to it.
    args.run_name = args.run_name or Path(args.output_dir).name
    live = LiveView(args.output_dir)
    if os.environ.get(VIEW):
        if not args.save_trajectories:
            raise G2POError("save_trajectories is False, and --view shows trajectories: leave one of them out")
        trainer.add_callback(live)
    if report_dataset is not None:
        trainer.add_callback(_ReportBefore(trainer, report_dataset))
    trainer.verdict.waits = True  # print it after the table
    try:
        trainer.train(resume_from_checkpoint=checkpoint or args.resume_from_checkpoint)
    except KeyboardInterrupt:
        trainer.close()
        if trainer.accelerator.is_main_process:
            print(f"\n{_how_to_resume(trainer)}", file=sys.stderr)
        raise SystemExit(130) from None
    if report_dataset is None:
        state = trainer.state
        if not any("eval_success_rate" in entry and entry["step"] == state.global_step for entry in state.log_history):
            trainer.evaluate()  # `eval_strategy` did not evaluate after the last step
    else:
        trainer.evaluate(report_dataset, metric_key_prefix=REPORT)

    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.create_model_card(dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        before, after = before_and_after(trainer.folder.evaluations)
        print(f"\n{panel}, {after['episodes']} episodes at temperature {args.eval_temperature}:\n")
        print(format_table({"after": after} if before is after else {"before": before, "after": after}))
        if others := at_other_temperatures(trainer.folder.evaluations, after["name"], args.other_eval_temperatures):
            print(f"\n{others}")
        if trainer.verdict.text:
            print(f"\n{trainer.verdict.text}")
        print(f"\nModel, trajectories and metrics are in {args.output_dir}")
        folder = quote(args.output_dir)
        print(f"Next: g2po evaluate --model {folder} --seeds 3, or g2po view {folder}")
    live.close()
    trainer.close()
    exit_code = 0
    if args.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=dataset_name)
        except HubError as error:
            print(error, file=sys.stderr)
            exit_code = EXIT_NOT_PUSHED
    trainer.accelerator.end_training()  # threads of a process group may abort Python at exit
    if exit_code:
        sys.exit(exit_code)


def _how_to_resume(trainer: G2POTrainer) -> str:
    """Return the text about a stopped run: its last checkpoint and how to resume."""
    args, step = trainer.args, trainer.state.global_step
    checkpoint = find_checkpoint("auto", args.output_dir) if args.save_strategy != "no" else None
    if checkpoint is None:
        return (
            f"Stopped at step {step}, before the first checkpoint (save_steps). The same command with --overwrite "
            "starts again."
        )
    return f"Stopped at step {step}. The same command with --resume-from-checkpoint auto continues from {checkpoint}."
