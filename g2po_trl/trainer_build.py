"""Build the parts of a `G2POTrainer` from its configuration and from the model that TRL has loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model
from transformers import GenerationConfig, PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import GRPOTrainer

from .agents.agent import is_agent
from .config import G2POConfig
from .credit.assignment import Credit
from .engines.base import Engine, EngineParts
from .engines.registry import ENGINES
from .engines.sampling import reshaping_options
from .environments.contract import Observation, TextEnvironment
from .environments.episode_limits import EpisodeLimits
from .environments.pool.limits import PoolLimits
from .environments.pool.pool import EnvironmentPool
from .environments.several import environments_of
from .environments.tasks import panels_of
from .environments.tools.trl_tools import is_tool_environment
from .prompts.chat_template import get_tokenizer
from .prompts.conversation import Message, pictures_of
from .prompts.images import ImageInputs
from .prompts.template import PromptTemplate
from .prompts.tokenization import ChatEncoder
from .rollout.actor import PromptActor
from .rollout.conversations import request_of
from .rollout.episode import Episode
from .rollout.failing_tasks import TaskErrors
from .rollout.player import Player
from .rollout.strategy import STRATEGIES, RolloutContext, RolloutStrategy
from .runs.callbacks import (
    CollapseStoppingCallback,
    IterationProgressCallback,
    LogFile,
    OwnSchedule,
    RolloutBar,
    TaskErrorReport,
)
from .runs.checkpoint import ReferenceState
from .runs.run_json import describe_run
from .trajectory import Step
from .update.batch import BatchingConfig, StepBatch
from .update.layout import Layout
from .update.policy.adapter_reference import AdapterReference
from .update.policy.importance import importance_ratio
from .update.policy.start_check import StartCheck
from .update.update import Update
from .utils.forward_pass import evaluation_mode, without_cudnn_attention
from .utils.trl_compat import (
    gather_params_of,
    is_sharded,
    name_or_path_of,
    unwrap_model_for_generation,
)

logger = logging.getLogger(__name__)
_SAMPLE_TOKENS = 64  # of the conversation that is scored before training


def no_reward_function(**kwargs):
    """Stand in for the reward function that `GRPOTrainer.__init__` requires; rewards come from the environment."""
    raise RuntimeError("rewards come from the environment; this function is never called")


def make_credit(args: G2POConfig, estimator: Callable | None, state_key: Callable[[Step], str] | None) -> Credit:
    """Return the configured state keys, graph and estimator."""
    return Credit(
        estimator,
        args.gamma,
        args.num_generations,
        args.value_lambda,
        args.state_key if state_key is None else state_key,
        args.state_key_ignores,
        gather_object,
    )


def make_player(
    trainer: GRPOTrainer,
    environment_factory: Callable[[], TextEnvironment],
    prompt_template: PromptTemplate,
    task_errors: TaskErrors,
) -> Player:
    """Return engine, prompts and environments. The prompt template is tested before workers are started."""
    args, accelerator = trainer.args, trainer.accelerator
    encode = ChatEncoder(trainer.processing_class, args.chat_template_kwargs)
    encode(prompt_template.messages("observation", "task"))  # a template that refuses does so now
    engine = make_engine(trainer)
    actor = PromptActor(
        engine, encode, prompt_template, args.history_length, args.max_prompt_length, trainer.setup.history
    )
    pool = EnvironmentPool(environment_factory, PoolLimits.of(args))

    def any_rank(flag: bool) -> bool:
        return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device)).item())

    return Player(pool, actor, EpisodeLimits.of(args), excluded=task_errors, any_running=any_rank)


def make_strategy(trainer: GRPOTrainer) -> RolloutStrategy:
    """Return the configured rollout strategy."""
    args, accelerator = trainer.args, trainer.accelerator

    def progress(turns: int, episodes: int) -> AbstractContextManager[RolloutBar]:
        return closing(RolloutBar("rollout", turns, episodes, accelerator.is_main_process))

    context = RolloutContext(
        trainer.player,
        group_size=args.num_generations,
        tasks=trainer.train_dataset,
        seed=args.seed,
        sampling=trainer.sampling,
        gather=gather_object,
        progress=progress,
    )
    return STRATEGIES[args.rollout_strategy].load()(context, **args.rollout_strategy_kwargs or {})


def make_engine(trainer: GRPOTrainer, name: str | None = None, **options: Any) -> Engine:
    """Return the configured engine, or another one of `ENGINES`, with its options."""
    args = trainer.args
    if name is None:
        name, options = args.engine, args.engine_kwargs or {}
    parts = EngineParts(
        args,
        get_tokenizer(trainer.processing_class),
        trainer.eos_token_ids,
        trainer.accelerator,
        model=lambda: trainer.accelerator.unwrap_model(trainer.model),
        generation_model=partial(_trained_model_for_generation, trainer),
        gather=gather_params_of(trainer),
        is_sharded=trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
        vllm=getattr(trainer, "vllm_generation", None),
        image_inputs=trainer.update.layout.image_inputs,
    )
    return ENGINES[name].load().of_trainer(parts, **options)


@contextmanager
def _trained_model_for_generation(trainer: GRPOTrainer, config: GenerationConfig) -> Iterator[torch.nn.Module]:
    """Provide the bare model in evaluation mode (training mode has dropout), gathered if ZeRO-3 shards it."""
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
        evaluation_mode(model),
    ):
        yield model


def make_update(trainer: GRPOTrainer) -> Update:
    """Return the configured layout, micro-batches and log-probabilities."""
    args = trainer.args
    layout = Layout(
        args.token_layout,
        trainer.model,
        trainer.accelerator,
        args.pad_to_multiple_of,
        others=[] if trainer.ref_model is None else [trainer.ref_model],
        temperature=trainer.temperature,
        image_inputs=ImageInputs.of(trainer.processing_class, trainer.model),
        checkpointing=args.gradient_checkpointing,
    )
    is_exact = not args.corrects_sampling and layout.precision(trainer.model) == torch.float32 and not _reshaped(args)
    correction = None
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        correction = partial(
            importance_ratio,
            mode=trainer.vllm_importance_sampling_mode,
            clip_min=trainer.vllm_importance_sampling_clip_min,
            clip_max=trainer.vllm_importance_sampling_clip_max,
        )
    update = Update(
        layout,
        trainer.accelerator,
        trainer._get_per_token_logps_and_entropies,
        BatchingConfig(
            args.steps_per_generation,
            args.max_tokens_per_micro_batch,
            args.loss_type,
            get_tokenizer(trainer.processing_class).pad_token_id,
            mini_batch_size=args.mini_batch_size,
        ),
        args.seed,
        trainer.beta,
        needs_old_log_probs=lambda mini_batches: (
            args.gradient_accumulation_steps % (mini_batches * trainer.num_iterations) != 0
        ),
        correction=correction,
        checkpointing=args.gradient_checkpointing_kwargs,
        old_of_engine=args.old_log_probs == "auto" and is_exact,
    )
    if trainer.beta != 0.0 and is_peft_model(trainer.model):
        update.log_probs.adapter_reference = AdapterReference(trainer.model, gather_params_of(trainer))
    return update


def sample_conversation(encode: ChatEncoder, messages: Sequence[Message]) -> StepBatch:
    """Return two step samples of equal length: the end of a conversation as the chat template writes it.

    They have the first half of the tokens in common, and the second half counts as the completion. With images, that
    is the answer.
    """
    asked = list(messages)
    try:
        text = encode.text([*asked, {"role": "assistant", "content": "go to the hall"}], add_generation_prompt=False)
    except Exception:  # templates raise errors of any class
        text = encode.text(asked)
    images = pictures_of(asked)
    ids = np.array(encode.ids([text], [images])[0], dtype=np.int32)
    if images:  # the tokens after the last one of an image
        at = int(np.isin(ids, encode.images.token_ids).nonzero()[0].max()) + 2
    else:
        ids = ids[-_SAMPLE_TOKENS:]
        at = max(1, len(ids) // 2)
    prompt, completion = np.split(ids, [at])
    ones, shown = np.ones(2, np.float32), [images] * 2 if images else None
    return StepBatch([prompt] * 2, [completion, np.roll(completion, 1)], ones, np.ones(2, bool), images=shown)


def _reshaped(args: G2POConfig) -> bool:
    """Return whether completions are not sampled from the whole distribution."""
    options = reshaping_options(args.generation_kwargs or {})
    return bool(args.filters() or args.vllm_structured_outputs_regex or options)


def make_start_check(trainer: GRPOTrainer) -> StartCheck:
    """Return the comparison of trainer, model, reference and engine before training."""
    args = trainer.args
    encode = ChatEncoder(trainer.processing_class, args.chat_template_kwargs)
    return StartCheck(
        trainer.update,
        trainer.ref_model,
        sample_conversation(encode, trainer.setup.prompt_template.messages("observation", "task")),
        trainer.temperature,
        comparable=not _reshaped(args),
    )


def read_starts(trainer: GRPOTrainer, starts: Sequence[Observation]) -> None:
    """Choose chat templates by the first observations of tasks; of images, check one with model and engine."""
    actor = trainer.player.actor
    _warn_of_unused_limit(EpisodeLimits.of(trainer.args), trainer.environment_factory, starts)
    for first in starts:
        actor.choose_template(first)
    seen = next((first for first in starts if first.images), None)
    if seen is None:
        return
    trainer.update.layout.notice_images()
    messages = request_of(Episode("", observation=seen), trainer.setup.prompt_template).messages
    trainer.start_check.sample = sample_conversation(actor.encode, messages)


def _warn_of_unused_limit(limits: EpisodeLimits, environment_factory: Any, starts: Sequence[Observation]) -> None:
    """Log that a limit of tool calls is set where there are no tools, by the first observations of tasks."""
    made = environments_of(environment_factory).values() or [environment_factory]
    offered = any(first.request and first.request.tools for first in starts)
    if not offered and not any(is_agent(one) or is_tool_environment(one) for one in made):
        if (why := limits.without_tools()) is not None:
            logger.warning("%s. Limit other episodes by max_turns.", why)


def keep_reference(trainer: GRPOTrainer) -> None:
    """Let checkpoints keep the reference: an adapter's, or a model of its own that is not sharded."""
    model, adapter = trainer.ref_model, trainer.update.log_probs.adapter_reference
    if adapter is not None:
        trainer.resumption.kept_in_files.append(adapter)
    if model is None or is_sharded(trainer):
        return
    state = ReferenceState(trainer.accelerator.unwrap_model(model), trainer.args.sync_ref_model)
    trainer.resumption.parts["reference"] = state
    trainer.resumption.kept_in_files.append(state)


def add_callbacks(trainer: GRPOTrainer) -> None:
    """Replace transformers' log lines by callbacks that report progress and stop a collapsed run."""
    args, pool = trainer.args, trainer.player.pool
    if trainer.accelerator.is_main_process and not torch.accelerator.is_available():
        print("No GPU found: training on the CPU.", flush=True)
    if trainer.accelerator.is_main_process and not args.disable_tqdm:
        print(pool.describe(args.per_device_train_batch_size * args.steps_per_generation), flush=True)
    for theirs in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):  # the first is another in notebooks
        trainer.remove_callback(theirs)
    for ours in (
        trainer.start_check,
        TaskErrorReport(trainer.task_errors),
        trainer.verdict,
        *([] if args.disable_tqdm else [IterationProgressCallback(args.optimizer_steps_per_iteration)]),
        *([CollapseStoppingCallback(args.min_valid_action_ratio)] if args.min_valid_action_ratio else []),
        trainer.sample_table,
        LogFile(trainer.folder.path / "log.jsonl"),
        OwnSchedule(),
    ):
        trainer.add_callback(ours)


def precision_of(trainer: GRPOTrainer) -> dict[str, str | None]:
    """Return dtype and autocast of `generate`, by torch's names; see `describe_run`."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if is_peft_model(model) else model
    # Autocast wraps the forward pass of the prepared model, and `generate` of an adapter calls that of its base.
    mixed = trainer.accelerator.native_amp and base is model
    autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision) if mixed else None
    return {"dtype": str(base.dtype).removeprefix("torch."), "autocast": autocast}


def describe(trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the run's description, see `describe_run`."""
    return describe_run(
        trainer.args,
        name_or_path_of(trainer.model.config),
        trainer.environment_factory,
        trainer.setup.prompt_template,
        trainer.estimator_name,
        precision_of(trainer),
        trainer.setup.history,
        trainer.player.actor.describe_template(),
        trainer.tasks_hash,
    )


def write_run(trainer: GRPOTrainer) -> None:
    """Write run.json and the panels before training."""
    trainer.folder.write_run(describe(trainer), panels_of(trainer.eval_dataset))
