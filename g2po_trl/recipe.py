"""What every recipe does once its trainer is made: write down how, train, evaluate, save, tell, publish."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trl import ModelConfig

from .config import G2POConfig
from .evaluation import format_table
from .persistence import HubError
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


def run_recipe(
    trainer: G2POTrainer, checkpoint: str | None, settings: Mapping[str, Any], dataset_name: str | None = None
) -> None:
    """Train from the start or a checkpoint, evaluate, save the model and its card, print success before and after.

    Args:
        checkpoint: a folder, or `None`.
        settings: of the script, written to output_dir/run.json with those of the trainer.
        dataset_name: for the model card.

    Raises:
        SystemExit: with code 3 when all went well but the Hub did not take the model.
    """
    args = trainer.args
    trainer.run_settings = settings
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()

    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.create_model_card(dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        before, after = trainer.evaluations[0], trainer.evaluations[-1]
        print(f"\nHeld-out tasks, {after['episodes']} episodes at temperature {args.eval_temperature}:\n")
        print(format_table({"before": before, "after": after}))
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
