"""What a `G2POTrainer` has, made from its configuration and from what TRL has made of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from transformers import GenerationConfig, PrinterCallback, ProgressCallback
from trl import GRPOTrainer

from .config import G2POConfig
from .credit.assignment import Credit
from .engines.base import Engine
from .engines.transformers import TransformersEngine
from .environments.contract import TextEnvironment
from .environments.pool.pool import EnvironmentPool
from .experimental.branching.branching import Branching
from .experimental.branching.rules import ChooseBranches, least_visited
from .experimental.partial_rollouts import Rolling
from .prompts.chat_template import get_tokenizer
from .prompts.template import PromptTemplate
from .prompts.tokenization import ChatEncoder
from .rollout.actor import PromptActor
from .rollout.dynamic_sampling import Refill
from .rollout.failing_tasks import TaskErrorReport, TaskErrors
from .rollout.player import Player
from .runs.callbacks import callbacks_of
from .runs.run_json import describe_run
from .trajectory import Step
from .update.iteration import Iteration
from .update.layout import Layout
from .update.log_probs import Correction
from .update.update import Update
from .utils.sdpa import without_cudnn_attention
from .utils.trl_compat import name_or_path_of, train_metrics_of, unwrap_model_for_generation


def no_reward_function(**kwargs):
    """Satisfies `GRPOTrainer.__init__`, which wants a reward function; rewards come from the environment."""
    raise RuntimeError("rewards come from the environment; this function is never called")


def make_credit(args: G2POConfig, estimator: Callable | None, state_key: Callable[[Step], str] | None) -> Credit:
    """State keys, graph and estimator as configured."""
    return Credit(
        estimator,
        args.gamma,
        args.num_generations,
        args.value_lambda,
        state_key,
        args.state_key_ignores,
        args.state_similarity,
        gather_object,
    )


def make_player(
    trainer: GRPOTrainer,
    environment_factory: Callable[[], TextEnvironment],
    prompt_template: PromptTemplate,
    task_errors: TaskErrors,
) -> Player:
    """Engine, prompts and environments. The prompt template is tried before workers are started."""
    args, accelerator = trainer.args, trainer.accelerator
    encode = ChatEncoder(trainer.processing_class, args.chat_template_kwargs)
    encode(prompt_template.messages("observation", "task"))  # a template that refuses does so now
    engine = make_engine(trainer)
    streams = streams_rollouts(args, engine)
    actor = PromptActor(engine, encode, prompt_template, args.history_length, args.max_prompt_length)
    pool = EnvironmentPool(
        environment_factory,
        num_workers=args.num_environment_workers,
        reset_timeout=args.environment_reset_timeout,
        step_timeout=args.environment_step_timeout,
        **(args.environment_pool_kwargs or {}),
    )

    def any_rank(flag: bool) -> bool:
        return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device)).item())

    return Player(pool, actor, args.max_turns, streams, task_errors, any_rank)


def streams_rollouts(args: G2POConfig, engine: Engine) -> bool:
    """Whether episodes are asked one by one.

    Raises:
        ValueError: when they should be, and cannot.
    """
    if args.stream_rollouts is None:
        # Without seeds, which reply comes first would decide what it says.
        return engine.streams and engine.takes_seeds
    if args.stream_rollouts and not engine.streams:
        raise ValueError(
            "stream_rollouts is True, and this engine answers all prompts of a turn together: set vllm_servers, or "
            "use_vllm with vllm_mode='colocate' and vllm_tensor_parallel_size=1, or leave stream_rollouts at None"
        )
    return args.stream_rollouts


def make_refill(trainer: GRPOTrainer) -> Refill:
    """Which groups are played again, as configured."""
    args = trainer.args
    return Refill(args.refill_groups, trainer.train_dataset, args.seed, trainer.task_errors, gather_object)


def _check_whole_groups(args: G2POConfig, option: str) -> None:
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ValueError(
            f"{option} is {getattr(args, option)}, and a process plays per_device_train_batch_size x "
            f"steps_per_generation = {rows} episodes, which are not whole groups of num_generations="
            f"{args.num_generations}: make it a multiple"
        )


def make_branching(trainer: GRPOTrainer, choose: ChooseBranches | None) -> Branching | None:
    """Episodes that continue others, where `branch_share` asks for them.

    Raises:
        ValueError: where they cannot.
    """
    args, credit = trainer.args, trainer.credit
    if not args.num_branches:
        if choose is not None:
            raise ValueError("choose_branches is set and branch_share is 0: set branch_share, or remove it")
        return None
    _check_whole_groups(args, "branch_share")
    rule = least_visited if choose is None else choose
    own_keys = credit.state_key is None and args.state_similarity == 1
    return Branching(
        args.num_branches,
        args.num_generations,
        lambda groups, budget: rule(credit.graph_of_rank(groups), budget),
        compares_keys=own_keys,
        gather=gather_object,
    )


def make_rolling(trainer: GRPOTrainer) -> Rolling | None:
    """Groups that go on from one rollout to the next, where `rollouts_ahead` asks for them.

    Raises:
        ValueError: where they cannot.
    """
    args, player, accelerator = trainer.args, trainer.player, trainer.accelerator
    if not args.rollouts_ahead:
        return None
    if player.actor.is_collective:
        raise ValueError(
            f"rollouts_ahead is {args.rollouts_ahead}, and this engine generates for several processes together, but "
            "their groups are not complete together: set vllm_servers, or use_vllm with vllm_mode='colocate' and "
            "vllm_tensor_parallel_size=1 on models that are not sharded, or leave rollouts_ahead at 0"
        )
    _check_whole_groups(args, "rollouts_ahead")
    size, tasks, rank = args.num_generations, trainer.train_dataset, accelerator.process_index
    return Rolling(player, size, args.rollouts_ahead, tasks, args.seed, rank, gather_object, trainer.branching)


def make_engine(trainer: GRPOTrainer, kind: str | None = None) -> Engine:
    """Return the engine that the options ask for: `generate` by default, `use_vllm` with `vllm_mode` "colocate" or
    "server", or `vllm_servers`. `kind` asks for another: "vllm", "served" or "generate".
    """
    args, ends = trainer.args, trainer.eos_token_ids
    tokenizer, options = get_tokenizer(trainer.processing_class), args.generation_kwargs
    kind = kind or ("vllm" if args.use_vllm else "served" if args.vllm_servers else "generate")
    if kind == "served":
        return _make_served_engine(trainer, tokenizer, options)
    if kind == "vllm":
        from .engines.trl_vllm import VLLMEngine

        return VLLMEngine(
            tokenizer, ends, trainer.vllm_generation, trainer.accelerator, trainer.model, args.seed, options
        )
    options = {"cache_implementation": args.cache_implementation, **(options or {})}
    # With sharded weights every rank must run the same generate calls, with as many forward passes in each.
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return TransformersEngine(
        tokenizer,
        ends,
        partial(_lend_trained_model, trainer),
        args.generation_batch_tokens,
        sharded,
        trainer.accelerator.device,
        options,
        logprobs=args.rollouts_ahead > 0,
    )


def _make_served_engine(trainer: GRPOTrainer, tokenizer: Any, options: dict[str, Any] | None) -> Engine:
    from .experimental.vllm_servers.engine import ServedVLLMEngine
    from .experimental.vllm_servers.weight_sync import TrainerHandle

    args = trainer.args
    if args.vllm_structured_outputs_regex is not None:
        options = {"structured_outputs": {"regex": args.vllm_structured_outputs_regex}, **(options or {})}
    connection = TrainerHandle(
        trainer.accelerator,
        lambda: trainer.accelerator.unwrap_model(trainer.model),
        partial(_lend_trained_model, trainer),
        trainer._dist.gather_params,
        None if args.max_prompt_length is None else args.max_prompt_length + args.max_completion_length,
        args.training_sampling(),
        args.vllm_importance_sampling_correction,
    )
    # What begins with an underscore is not pushed to the Hub.
    folder = args.vllm_weights_folder or Path(args.output_dir, "_vllm_weights")
    patience, reply_timeout = args.vllm_server_timeout, args.vllm_request_timeout
    return ServedVLLMEngine(
        tokenizer, trainer.eos_token_ids, args.vllm_servers, folder, connection, patience, reply_timeout, options
    )


@contextmanager
def _lend_trained_model(trainer: GRPOTrainer, config: GenerationConfig) -> Iterator[torch.nn.Module]:
    """The bare model, gathered where ZeRO-3 sharded it, in evaluation mode: training mode means dropout."""
    with (
        without_cudnn_attention(),
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=config.to_diff_dict(),
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
    ):
        was_training = model.training
        model.eval()
        try:
            yield model
        finally:
            model.train(was_training)


def make_iteration(trainer: GRPOTrainer) -> Iteration:
    """The place in the run, before its first training step."""
    args, correction = trainer.args, trainer.update.log_probs.correction
    prepared_with = {
        "loss_type": args.loss_type,
        "beta": "0" if trainer.beta == 0.0 else "above 0",
        "mini_batch_size": args.mini_batch_size,
        **{
            f"vllm_importance_sampling_{name}": getattr(correction, name, None)
            for name in ("mode", "clip_min", "clip_max")
        },
    }
    return Iteration(args.steps_per_generation, trainer.num_iterations, train_metrics_of(trainer), prepared_with)


def make_update(trainer: GRPOTrainer) -> Update:
    """Layout, micro-batches and log-probabilities as configured."""
    args = trainer.args
    layout = Layout(
        args.token_layout,
        trainer.model,
        trainer.accelerator,
        args.max_tokens_per_micro_batch,
        args.packed_row_tokens,
        args.pad_to_multiple_of,
        others=[] if trainer.ref_model is None else [trainer.ref_model],
    )
    correction = None
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        correction = Correction(
            trainer.vllm_importance_sampling_mode,
            trainer.vllm_importance_sampling_clip_min,
            trainer.vllm_importance_sampling_clip_max,
        )
    return Update(
        layout,
        trainer.accelerator,
        trainer._get_per_token_logps_and_entropies,
        args.steps_per_generation,
        args.max_tokens_per_micro_batch,
        args.loss_type,
        get_tokenizer(trainer.processing_class).pad_token_id,
        args.seed,
        trainer.beta,
        needs_old_log_probs=lambda mini_batches: (
            args.gradient_accumulation_steps % (mini_batches * trainer.num_iterations) != 0
        ),
        correction=correction,
        checkpointing=args.gradient_checkpointing_kwargs,
        mini_batch_size=args.mini_batch_size,
    )


def add_callbacks(trainer: GRPOTrainer) -> None:
    """What a user watches, and what ends a run that has come apart, in place of transformers' own lines."""
    args, pool = trainer.args, trainer.player.pool
    if trainer.accelerator.is_main_process and not torch.accelerator.is_available():
        print("No GPU found: training on the CPU.", flush=True)
    if trainer.accelerator.is_main_process and not args.disable_tqdm:
        print(pool.describe(args.per_device_train_batch_size * args.steps_per_generation), flush=True)
    for theirs in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(theirs)
    for ours in (TaskErrorReport(trainer.task_errors), trainer.verdict, *callbacks_of(args), trainer.sample_table):
        trainer.add_callback(ours)


def precision_of(trainer: GRPOTrainer) -> dict[str, str | None]:
    """Return what completions of `generate` are computed in, by torch's names; see `describe_run`."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if is_peft_model(model) else model
    # Autocast wraps the forward pass of the prepared model, and `generate` of an adapter calls that of its base.
    mixed = trainer.accelerator.native_amp and base is model
    autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision) if mixed else None
    return {"dtype": str(base.dtype).removeprefix("torch."), "autocast": autocast}


def write_run(trainer: GRPOTrainer, step: int = 0) -> None:
    """run.json and the panels, before training. `step`: the run goes on after it."""
    origin, template = name_or_path_of(trainer.model.config), trainer.prompt_template
    panels = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    described = describe_run(
        trainer.args, origin, trainer.environment_factory, template, trainer.estimator_name, precision_of(trainer)
    )
    trainer.folder.write_run(
        described | {"identity": trainer.run_identity()},
        {name: panel for name, panel in panels.items() if panel is not None},
        step,
    )
