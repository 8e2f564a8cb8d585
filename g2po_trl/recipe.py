"""What every recipe does once its trainer is made: write down how, train, evaluate, save, tell, publish."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import ModelConfig

from .config import G2POConfig
from .runs.evaluation import REPORT, before_and_after, format_table
from .runs.hub import HubError
from .trainer import G2POTrainer

EXIT_NOT_PUSHED = 3


def use_model_arguments(args: G2POConfig, model_args: ModelConfig) -> None:
    """What the model is loaded with: TRL's `ModelConfig`, under the `model_init_kwargs` that are set already."""
    args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }


class _ReportBefore(TrainerCallback):
    """Evaluates the reported panel once, when training begins: sharded models can play only then."""

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
) -> None:
    """Train from the start or a checkpoint, evaluate, save the model and its card, print success before and after.

    Args:
        checkpoint: a folder, or `None`.
        settings: of the script, written to output_dir/run.json with those of the trainer.
        dataset_name: for the model card.
        report_dataset: the panel that is reported, played before and after training. Needed where
            `load_best_model_at_end` chooses a checkpoint by its success on the trainer's `eval_dataset`: the largest
            of many numbers is too high on average. `None`: the trainer's panel.

    Raises:
        ValueError: when a checkpoint would be chosen and reported on the same panel.
        SystemExit: with code 3 when all went well but the Hub did not take the model, 130 after Ctrl-C.
    """
    args = trainer.args
    if args.load_best_model_at_end and report_dataset is None:
        raise ValueError("load_best_model_at_end is True and report_dataset is None: pass another panel to report on")
    trainer.folder.settings = settings
    if report_dataset is not None:
        trainer.add_callback(_ReportBefore(trainer, report_dataset))
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        trainer.close()
        step = trainer.state.global_step
        message = f"\nStopped at step {step}. The same command with --resume_from_checkpoint auto goes on."
        print(message, file=sys.stderr)
        raise SystemExit(130) from None
    if report_dataset is None:
        trainer.evaluate()
    else:
        trainer.evaluate(report_dataset, metric_key_prefix=REPORT)

    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.create_model_card(dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        before, after = before_and_after(trainer.folder.evaluations)
        print(f"\nHeld-out tasks, {after['episodes']} episodes at temperature {args.eval_temperature}:\n")
        print(format_table({"after": after} if before is after else {"before": before, "after": after}))
        print(f"\nModel, trajectories and metrics are in {args.output_dir}")
    trainer.close()
    exit_code = 0
    if args.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=dataset_name)
        except HubError as error:
            print(error, file=sys.stderr)
            exit_code = EXIT_NOT_PUSHED
    trainer.accelerator.end_training()  # threads of a process group that is still there may abort Python as it exits
    if exit_code:
        sys.exit(exit_code)
