"""Checks of `G2POTrainer` that need the model, the data or a rollout. `G2POConfig` checks values alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from transformers.utils.logging import get_logger
from trl import GRPOTrainer

from .config import G2POConfig
from .credit.graph import TrajectoryRecord
from .environments.contract import TextEnvironment
from .prompts.tokenization import get_chat_template
from .trajectory import Trajectory
from .utils.adapters import check_adapter, check_adapter_config
from .utils.errors import G2POError
from .utils.forward_pass import context_length
from .utils.options import option_text, require
from .utils.trl_compat import is_sharded

logger = get_logger(__name__)

# Arguments of GRPOTrainer that it would ignore here -> the remedy.
_REFUSED_ARGUMENTS = {
    "reward_processing_classes": "they belong to reward models. Remove it",
    "rollout_func": "pass an agent, a function that calls the model (agent=), instead",
}


def check_not_imported() -> None:
    """Refuse a trainer that a module makes while it is imported, as `g2po evaluate` and workers import it."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        is_imported = getattr(frame.f_globals.get("__spec__"), "_initializing", False)
        if is_imported and frame.f_code.co_name == "<module>":
            raise G2POError(
                f"{frame.f_code.co_filename} trains while it is imported: put the training under "
                "if __name__ == '__main__':"
            )


def check_arguments(
    model: Any,
    args: G2POConfig,
    options: Mapping[str, Any],
    environment_factory: Any,
    advantage_fn: Callable | None,
    state_key: Callable | None,
) -> None:
    """Check the trainer's arguments before anything is loaded."""
    for name, remedy in _REFUSED_ARGUMENTS.items():
        if options.get(name) is not None:
            raise TypeError(f"G2POTrainer does not accept {name}: {remedy}")
    makes_environments = callable(environment_factory) and not isinstance(environment_factory, TextEnvironment)
    remedy = (
        "pass a TextEnvironment class or a tool-based class, or functools.partial(CLASS, …) for its arguments; or "
        "tools and reward_funcs; or an agent"
    )
    require(makes_environments, "environment_factory", environment_factory, remedy)
    if state_key is not None:
        require(callable(state_key), "state_key", state_key, "pass a function, or set it in G2POConfig")
        require(args.state_key is None, "state_key", args.state_key, "G2POTrainer has a function, too: choose one")
    for name in args.fields_with("of_estimator") if advantage_fn is not None else ():
        value, default = getattr(args, name), getattr(type(args), name)
        remedy = f"advantage_fn replaces the estimator: apply it inside, or leave it at {default!r}"
        require(value == default, name, value, remedy)
    has_adapter = options.get("peft_config") is not None or (not isinstance(model, str) and is_peft_model(model))
    remedy = "the reference of an adapter is the adapter at the start: set it to False, or train all weights"
    require(not (args.sync_ref_model and has_adapter), "sync_ref_model", True, remedy)
    if hasattr(options.get("peft_config"), "peft_type"):  # else TRL says what it is
        check_adapter_config(options["peft_config"])
    if isinstance(model, torch.nn.Module):
        check_adapter(model)


def check_trainer(trainer: GRPOTrainer) -> None:
    """Check tokenizer, model, sharding, schedule and dataset once TRL's constructor has run."""
    args, model, accelerator = trainer.args, trainer.model, trainer.accelerator
    check_adapter(model)
    groups, tasks = args.generation_batch_size // args.num_generations, len(trainer.train_dataset)
    shards, has_template = trainer.is_fsdp_enabled, get_chat_template(trainer.processing_class) is not None
    saves = is_sharded(trainer) and args.save_strategy != "no"
    remedy = "the tokenizer has none: use an instruction-tuned model, or give it one (--chat-template FILE)"
    require(has_template, "chat_template", None, remedy)
    remedy = "no parameter trains: load adapters with is_trainable=True, or call model.requires_grad_(True)"
    trained = {id(one) for one in model.parameters() if one.requires_grad}
    require(bool(trained), "requires_grad", False, remedy)
    optimized = trainer.optimizer.param_groups if trainer.optimizer else [{"params": model.parameters()}]
    moves = any(id(one) in trained for group in optimized for one in group["params"])
    require(
        moves, "optimizers", trainer.optimizer, "none of its parameters is one that trains: make it of the model's"
    )
    remedy = "the auxiliary loss of mixture-of-experts models would depend on micro-batches; set it to 0"
    require(not trainer.aux_loss_enabled, "router_aux_loss_coef", trainer.router_aux_loss_coef, remedy)
    remedy = "FSDP would not average the gradient of the LM head over ranks; leave it out, or train with DDP"
    saves_head = hasattr(model.get_output_embeddings(), "modules_to_save")
    require(not (shards and saves_head), "modules_to_save", "the LM head", remedy)
    require(not shards or accelerator.is_fsdp2, "fsdp_version", 1, "generation needs FSDP2; set it to 2")
    remedy = "no checkpoint of a sharded model has the reference; set save_strategy='no', or train with DDP"
    require(not (args.sync_ref_model and saves), "sync_ref_model", True, remedy)
    remedy = (
        f"a rollout plays {groups} groups (generation_batch_size / num_generations) of different tasks; add tasks, or "
        "set a smaller per_device_train_batch_size"
    )
    require(tasks >= groups, "train_dataset", f"{tasks} row(s)", remedy)
    remedy = "checkpointed layers would read it in the loss: set it to 0 in the model's configuration"
    layerdrop = getattr(model.config.get_text_config(), "layerdrop", 0)
    require(not (args.gradient_checkpointing and layerdrop), "layerdrop", layerdrop, remedy)
    weights = [weight.detach() for weight in model.parameters() if weight.requires_grad and weight.dtype.itemsize == 2]
    lost = sum(int((weight + args.learning_rate == weight).sum()) for weight in weights)
    kept = trainer.is_partitioned and accelerator.mixed_precision != "no"  # FSDP and DeepSpeed then train float32
    if 2 * lost > (total := sum(weight.numel() for weight in weights)) and not kept:
        logger.warning(
            f"{lost / total:.0%} of the {weights[0].dtype} weights are unchanged by a step of learning_rate "
            f"{args.learning_rate:g}, which rounds away: load it with dtype='float32' (bf16=True is fast)"
        )
    longest, most = context_length(model.config), (args.max_prompt_length or 0) + args.max_completion_length
    if longest is not None and most > longest:
        logger.warning(
            f"max_prompt_length + max_completion_length is {most}, and the model's positions hold {longest} tokens: "
            "an episode whose prompt leaves no room for the longest completion ends as a failure (context overflow)"
        )
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    of_engine = [name for name in ("optimizer", "scheduler") if plugin and name in plugin.deepspeed_config]
    constant = option_text(args.lr_scheduler_type) == "constant" and "scheduler" not in of_engine
    remedy = f"DeepSpeed's {' and '.join(of_engine)} would count mini-batches. Remove it, or set mini_batch_size=None"
    fits = args.mini_batch_size is None or not of_engine or constant
    require(fits, "mini_batch_size", args.mini_batch_size, remedy)


def check_errors(records: Sequence[TrajectoryRecord], own_errors: list[str], max_error_rate: float) -> None:
    """Stop a run, on all ranks, in which more than `max_error_rate` of the trajectories have no result."""
    not_begun = [r.failure_reason for r in records if r.counted and not r.keys]
    failed = [r for r in records if r.outcome == "error"]
    for what, ended in (("before their first step", not_begun), ("in an environment error", failed)):
        if (rate := len(ended) / len(records)) > max_error_rate:
            reasons = gather_object(own_errors[:1]) if ended is failed else not_begun
            raise G2POError(
                f"{rate:.0%} of the trajectories ended {what}, more than max_error_rate={max_error_rate:.0%}. Nothing "
                f"can be learned from them: fix the cause, or raise max_error_rate. The first:\n{reasons[0]}",
                "max_error_rate",
            )


def warn_of_ignored_fields(trajectories: Iterable[Trajectory]) -> None:
    """Log, once, the fields of agents' requests that have no effect."""
    if ignored := {field for one in trajectories for field in one.info.get("ignored_fields", ())}:
        logger.warning_once(
            f"The agent sets {', '.join(sorted(ignored))} in its requests. Training decides how completions are "
            "sampled, so this has no effect: set temperature, top_p and the like in the trainer's configuration."
        )
