"""Train by a recipe: parse its arguments, load its tasks, then train, evaluate, save and publish."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..config import G2POConfig
from ..config_validation import inherited
from ..environments.tasks import tasks_dataset
from ..prompts.images import load_processing_class
from ..runs.checkpoint import find_checkpoint
from ..runs.hub import HubError
from ..runs.ownership import check_free
from ..runs.summary import REPORT, before_and_after, format_table
from ..trainer import G2POTrainer
from ..utils.options import require, switches_of
from .parser import Keys, check_effect, parse
from .recipe_files import check_files_and_packages, config_keys

CPU = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}  # TRL's defaults of these are for GPUs
NamedPanel = tuple[str, Keys]  # an environment's panel: its name, and options of `load_panel`


def parse_arguments(
    types: Sequence[type],
    config: str | Callable[[Keys], Keys] | None = None,
    defaults: Callable[[Keys], Keys] = lambda given: {},
    argv: Sequence[str] | None = None,
    configs: str = "",
) -> tuple[Any, ...]:
    """Return an object of each type: from flags, else the file of `--config`, else `defaults`, else the fields' own.

    `config` is the name of the file without `--config`, e.g. "alfworld/tiny", or a function from flags to its keys;
    `configs` the folder of recipes/ whose files `--config` takes by name, by default that of `config`. `defaults`
    returns field -> value from the values that flags and file set. `argv` is the command line by default.

    Raises:
        SystemExit: after `--help`, and for an unknown argument or an invalid value.
        G2POError: if a file, a model's folder or a package is missing, or an option has no effect.
    """
    of_machine = {} if torch.accelerator.is_available() else CPU
    sources = {
        "config": partial(config_keys, config, configs),
        "defaults": lambda given: {**of_machine, **defaults(given)},
    }
    *parsed, given = parse(types, argv, **sources)
    # A switch that is given as off is a decision: `--use-vllm false` with the configuration of a GPU.
    switches = given | ({"engine"} if "use_vllm" in given else set())
    needs = {name: needed for name, needed in inherited("needs").items() if switches.isdisjoint(switches_of(needed))}
    check_effect(given, parsed, needs)
    disable_progress_bar()  # transformers shows one for each file that it reads or writes
    check_files_and_packages({name: value for options in parsed for name, value in vars(options).items()})
    if isinstance(parsed[-1], ModelConfig):
        args, of_model = parsed[-2:]
        own = {"revision": of_model.model_revision, "attn_implementation": of_model.attn_implementation}
        args.model_init_kwargs = {"dtype": of_model.dtype, **own, **(args.model_init_kwargs or {})}
    return tuple(parsed)


@dataclass(kw_only=True)
class Task:
    """What a recipe trains on, and what it reports success on.

    Args:
        train: rows of the training tasks.
        held_out: rows of the evaluations.
        reported: rows of the panel that is reported. Empty: the held-out ones.
        facts: number and kind of the tasks, for the start of the log and the model card.
        trainer: further arguments of the trainer, such as `environment_factory` and `prompt_template`.
        evaluation: `environment`, `panel` and `panel_options` with which `g2po evaluate` plays the reported panel.
    """

    train: Sequence[Keys]
    held_out: Sequence[Keys]
    reported: Sequence[Keys] = ()
    facts: Mapping[str, str]
    trainer: Keys
    evaluation: Keys | None = None

    @classmethod
    def of_panels(
        cls, environment: str, held_out: NamedPanel, reported: NamedPanel | None, trainer: Keys, **task: Any
    ):
        """Return a task whose evaluations and environment are those of panels of a bundled environment."""
        load = import_module(f"g2po_envs.{environment}.panels").load_panel
        first = load(held_out[0], **held_out[1])
        others = load(reported[0], **reported[1]).rows if reported else ()
        name, options = reported or held_out
        shared = sum(row in first.rows for row in others)
        remedy = f"{shared} of its tasks are in evaluations, which choose the checkpoint: report on others"
        require(not shared, "reported", name, remedy)
        return cls(
            held_out=first.rows,
            reported=others,
            trainer={"environment_factory": first.environment_factory, **trainer},
            evaluation={"environment": environment, "panel": name, "panel_options": dict(options)},
            **task,
        )


def numbered_panels(
    name: str, options: Keys, number: int, reported: int | None, args: G2POConfig
) -> tuple[NamedPanel, NamedPanel | None]:
    """Return the panel of evaluations, and the one to report: the `reported` tasks after its `number` tasks.

    `reported=None`: as many others if evaluations choose a checkpoint, else no other panel.
    """
    others = reported or (number if args.load_best_model_at_end else 0)
    report = (name, {**options, "number": others, "skip": number}) if others else None
    return (name, {**options, "number": number}), report


@dataclass(frozen=True)
class Recipe:
    """A training: its tasks, its options and its defaults.

    Args:
        tasks: a function of the options and of the trainer's arguments.
        options: dataclass of the options.
        config: see `parse_arguments`.
        dataset_name: for the model card.
        model: folder of the model that is trained by default. `None`: there is none.
        config_class: dataclass of the trainer's arguments.
        trainer_class: the trainer.
    """

    tasks: Callable[[Any, G2POConfig], Task]
    options: type
    config: str | Callable[[Keys], Keys]
    dataset_name: str | None = None
    model: str | Path | None = None
    config_class: type[G2POConfig] = G2POConfig
    trainer_class: Callable[..., G2POTrainer] = G2POTrainer

    @property
    def types(self) -> tuple[type, ...]:
        return self.options, self.config_class, ModelConfig

    def train(self) -> None:
        """Parse the command line, load the tasks, and train."""
        options, args, model_args = parse_arguments(self.types, self.config, lambda given: {"eval_on_start": True})
        model = model_args.model_name_or_path or self.model
        require(model is not None, "model_name_or_path", None, "pass --model, a folder or a Hub id")
        check_free(args.output_dir, args.resume_from_checkpoint, args.overwrite)  # before tasks and model are loaded
        args.eval_on_start &= find_checkpoint(args.resume_from_checkpoint, args.output_dir) is None
        with args.main_process_first(desc="tasks"):
            task = self.tasks(options, args)
        if args.process_index == 0:
            print("\n".join(f"{name}: {fact}" for name, fact in task.facts.items()), flush=True)
        processing_class, template = None, getattr(options, "chat_template", None)
        if template is not None:
            sides = {"padding_side": "left", "truncation_side": "left"}  # as TRL loads it
            processing_class = load_processing_class(str(model), revision=model_args.model_revision, **sides)
            processing_class.chat_template = Path(template).read_text(encoding="utf-8")
        trainer = self.trainer_class(
            model=str(model),
            args=args,
            train_dataset=tasks_dataset(task.train),
            eval_dataset=tasks_dataset(task.held_out),
            processing_class=processing_class,
            peft_config=get_peft_config(model_args),
            quantization_config=get_quantization_config(model_args),
            card_facts=task.facts,
            **task.trainer,
        )
        trainer.folder.settings = {"script": asdict(options), "model": asdict(model_args)}
        trainer.folder.settings |= {"evaluation": task.evaluation} if task.evaluation else {}
        reported = tasks_dataset(task.reported) if task.reported else None
        run_recipe(trainer, self.dataset_name, reported)


class _ReportBefore(TrainerCallback):
    """Evaluation of the reported panel when training begins; sharded models cannot generate before."""

    def __init__(self, trainer: G2POTrainer, dataset: Dataset):
        self.trainer, self.dataset = trainer, dataset

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.trainer.evaluate(self.dataset, metric_key_prefix=REPORT)


class _SaveOnInterrupt(TrainerCallback):
    """Ctrl-C or SIGTERM, if steps would be lost, stops after the next optimizer step with a checkpoint.

    A second Ctrl-C stops at once. Schedulers send SIGTERM to each process and to its launcher, which passes it on.
    """

    pressed = unsaved = is_main = False
    code = 130

    def _press(self, number, frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.code = 128 + number
        if not self.unsaved:
            raise KeyboardInterrupt
        if self.is_main and not self.pressed:
            print("\nStopping with a checkpoint after the next update. Ctrl-C again stops at once.", file=sys.stderr)
        self.pressed = True

    def on_train_begin(self, args, state, control, **kwargs):
        self.is_main, self.unsaved = state.is_world_process_zero, args.world_size > 1  # others may be a step ahead
        signal.signal(signal.SIGINT, self._press)
        signal.signal(signal.SIGTERM, self._press)

    def on_step_end(self, args, state, control, **kwargs):
        self.unsaved, self.pressed = True, any(gather_object([self.pressed]))
        control.should_save |= self.pressed
        control.should_training_stop |= self.pressed

    def on_save(self, args, state, control, **kwargs):
        self.unsaved = args.world_size > 1

    def on_train_end(self, args, state, control, **kwargs):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_recipe(trainer: G2POTrainer, dataset_name: str | None = None, report_dataset: Dataset | None = None) -> None:
    """Train, evaluate, save the model and its card, and print success before and after training.

    `report_dataset` is played before and after training; `None`: `eval_dataset`. It is required with
    `load_best_model_at_end`: the maximum of several evaluations is biased upwards.

    Raises:
        G2POError: if there is no panel to report, or the checkpoint would be chosen on it.
        SystemExit: with code 3 if the model was trained but not pushed to the Hub, 130 after Ctrl-C, 143 after
            SIGTERM.
    """
    args, main, folder = trainer.args, trainer.accelerator.is_main_process, trainer.args.output_dir
    missing = report_dataset is None and (args.load_best_model_at_end or not trainer.eval_dataset)
    require(not missing, "report_dataset", None, "pass tasks to report on, others than those that choose a checkpoint")
    # Trackio ends its run with the training. One of the same name goes on: the last evaluation belongs to it.
    args.run_name = args.run_name or Path(folder).name
    interrupt = _SaveOnInterrupt()
    if report_dataset is not None:
        trainer.add_callback(_ReportBefore(trainer, report_dataset))
    if args.save_strategy != "no":
        trainer.add_callback(interrupt)
    trainer.verdict.waits = True  # print it after the table
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        if interrupt.pressed:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        trainer.close()
        saved = find_checkpoint("auto", folder)
        how = f"--resume-from-checkpoint auto continues from {saved}" if saved else "--overwrite starts again"
        if main:
            print(f"\nStopped at step {trainer.state.global_step}. The same command with {how}.", file=sys.stderr)
        raise SystemExit(interrupt.code) from None
    state = trainer.state
    if report_dataset is not None:
        trainer.evaluate(report_dataset, metric_key_prefix=REPORT)
    elif not any("eval_success_rate" in row for row in state.log_history if row["step"] == state.global_step):
        trainer.evaluate()  # `eval_strategy` did not evaluate after the last step
    trainer.save_model(folder)
    trainer.save_state()
    trainer.create_model_card(dataset_name=dataset_name)
    if main:
        before, after = before_and_after(trainer.folder.evaluations)
        print(f"\nEvaluation tasks, {after['episodes']} episodes at temperature {args.eval_temperature}:\n")
        print(format_table({"after": after} if before is after else {"before": before, "after": after}))
        if trainer.verdict.text:
            print(f"\n{trainer.verdict.text}")
        print(f"\nModel, trajectories and metrics are in {folder}")
        print(f"Next: g2po evaluate --model {quote(folder)} --seeds 3, or g2po view {quote(folder)}")
    trainer.close()
    try:
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset_name)
    except HubError as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from None
    finally:
        trainer.accelerator.end_training()  # threads of a process group may abort Python at exit
