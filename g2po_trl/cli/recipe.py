"""Helpers of recipes: parse arguments; then train, evaluate, save and publish with the recipe's trainer."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, ModelConfig, TrlParser

from ..config import G2POConfig
from ..runs.checkpoint import find_checkpoint
from ..runs.hub import HubError
from ..runs.ownership import check_free
from ..runs.summary import REPORT, at_other_temperatures, before_and_after, format_table
from ..trainer import G2POTrainer
from ..utils.dependent_options import check_given
from ..utils.parser import describe_unknown, read_config, refuse_removed, take_options
from .launch import VIEW
from .live_view import LiveView

EXIT_NOT_PUSHED = 3


def parse_arguments(
    types: Sequence[type],
    default_config: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Return a recipe's arguments: flags, then the file of `--config`, then `defaults`, then the fields' defaults.

    Args:
        types: dataclasses, e.g. `(ScriptArguments, G2POConfig, ModelConfig)`; one object of each is returned.
        default_config: the YAML file that is read without `--config`.
        defaults: field -> value.
        argv: the arguments. Default: the command line.

    Raises:
        SystemExit: after `--help`, and for an unknown argument or an invalid value.
    """
    try:
        options, argv = take_options(sys.argv[1:] if argv is None else argv, ("config",))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    config = options.get("config", default_config)
    argv += [] if config is None else ["--config", str(config)]
    parser = TrlParser(types, allow_abbrev=False)
    parser.usage = "%(prog)s [--config FILE] [--FIELD VALUE ...]"
    # Without `use_cpu`, transformers rejects bf16 on machines without an accelerator.
    parser.set_defaults_with_config(**{"use_cpu": not torch.accelerator.is_available(), **(defaults or {})})
    if {"-h", "--help"} & set(argv):
        parser.add_argument("--config", metavar="FILE", help="YAML file with any of these; flags override it")
        _group(parser, types)
        parser.print_help()
        raise SystemExit(0)
    try:
        keys = read_config(config)
        refuse_removed(keys, argv)
        check_given(_given(parser, argv, keys))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    *parsed, of_file, unknown = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    for words, where in ((unknown, "flag"), (of_file[::2], "key of the config file")):
        if words:
            raise SystemExit(describe_unknown(parser, words[0], where))
    disable_progress_bar()  # transformers shows one for each file that it reads or writes
    return tuple(parsed)


def _given(parser: argparse.ArgumentParser, argv: Sequence[str], keys: Collection[str]) -> set[str]:
    """Return the names of the fields on the command line and in the configuration file."""
    fields = {option: action.dest for action in parser._actions for option in action.option_strings}
    words = (word.partition("=")[0] for word in argv)
    return {fields[word] for word in words if word in fields} | set(keys)


def _group(parser: argparse.ArgumentParser, types: Sequence[type]) -> None:
    """Group the flags of the help by the class that declares them: g2po-trl's, TRL's, transformers'."""
    model = "Model (TRL's ModelConfig)"
    base = {GRPOConfig: "GRPO (TRL's GRPOConfig)", TrainingArguments: "Training (transformers' TrainingArguments)"}
    titles = {name: title for owner, title in base.items() for name in _fields(owner)}
    for owner in types:
        own = {f.name for f in dataclasses.fields(owner)}
        if not issubclass(owner, TrainingArguments):
            titles |= dict.fromkeys(own, model if owner is ModelConfig else "This recipe")
        else:
            titles |= dict.fromkeys(own - _fields(GRPOConfig), f"G2PO ({owner.__name__})")
    ours = sorted({title for title in titles.values() if title.startswith("G2PO")})
    wanted = ["This recipe", *ours, model, *base.values()]
    groups = {title: parser.add_argument_group(title) for title in wanted}
    options = parser._optionals
    for action in list(options._group_actions):
        if action.dest in titles:
            options._group_actions.remove(action)
            groups[titles[action.dest]]._group_actions.append(action)


def _fields(owner: type) -> set[str]:
    return {field.name for field in dataclasses.fields(owner)}


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

    Call it before the model is loaded.

    Raises:
        SystemExit: if the checkpoint does not exist, or output_dir holds another run.
    """
    try:
        check_free(args.output_dir, args.resume_from_checkpoint, args.overwrite)
        return find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def read_chat_template(file: str | Path) -> str:
    """Return the Jinja chat template in a file. Raises `SystemExit` if the file cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"chat_template is {str(file)!r}, which cannot be read: {error}") from error


def tokenizer_with_template(model_args: ModelConfig, file: str | Path) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer with the Jinja chat template of a file.

    Raises:
        SystemExit: if the file cannot be read.
    """
    template = read_chat_template(file)
    sides = {"padding_side": "left", "truncation_side": "left"}  # as TRL loads it
    options = {"revision": model_args.model_revision, **sides}
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, **options)
    tokenizer.chat_template = template
    return tokenizer


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
        ValueError: if there is no panel to report, or the checkpoint would be chosen on it.
        SystemExit: with code 3 if the model was trained but not pushed to the Hub, 130 after Ctrl-C.
    """
    args = trainer.args
    if args.load_best_model_at_end and report_dataset is None:
        raise ValueError("load_best_model_at_end is True and report_dataset is None: pass another panel to report on")
    if report_dataset is None and not trainer.eval_dataset:
        raise ValueError(
            f"report_dataset is None and the trainer's eval_dataset is {trainer.eval_dataset!r}: pass one, the "
            "panel that is played after training; or call trainer.train() instead"
        )
    trainer.folder.settings = settings
    # Trackio ends its run with the training. One of the same name goes on: the last evaluation belongs to it.
    args.run_name = args.run_name or Path(args.output_dir).name
    live = LiveView(args.output_dir)
    if os.environ.get(VIEW):
        if not args.save_trajectories:
            raise ValueError("save_trajectories is False, and --view shows trajectories: leave one of them out")
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
    return f"Stopped at step {step}. The same command with --resume_from_checkpoint auto continues from {checkpoint}."
