"""`G2POConfig`: TRL's `GRPOConfig` with the fields of agent training, the paper's values as defaults."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle torch threads must not spin on the environments' cores

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from trl import GRPOConfig

from .config_validation import (
    as_bound,
    check,
    check_advantage_fn,
    check_afterwards,
    check_estimator,
    logs_tables,
)
from .credit.estimators.registry import ESTIMATORS, estimator_name, make_estimator
from .credit.graph import StateGraph
from .credit.state_keys import IGNORABLE
from .engines.sampling import Sampling
from .environments.pool.limits import PoolLimits
from .update.packing import LAYOUTS
from .utils.dependent_options import set_best_metric
from .utils.masking import masked
from .utils.options import as_mapping, without_numpy
from .utils.trl_compat import ignore_deprecations

_ITERATIONS_PER_CHECKPOINT = 10
ignore_deprecations()


@dataclass
class G2POConfig(Sampling, PoolLimits, GRPOConfig):
    """Arguments of [`G2POTrainer`].

    Batch sizes count *trajectories*: `per_device_train_batch_size` x processes x `steps_per_generation` trajectories
    are rolled out together, `num_generations` of each task (one group). Their step samples are randomly split into
    `steps_per_generation` mini-batches, in blocks of eight neighbours in token order, so that samples with a common
    prefix stay together. Each mini-batch is split into micro-batches of at most `max_tokens_per_micro_batch` tokens.
    With `gradient_accumulation_steps=1` an iteration makes `steps_per_generation` optimizer steps. `mini_batch_size`
    sets the size of a mini-batch instead of their number.

    Args:
        mini_batch_size: maximum number of step samples of an optimizer step, over all processes, as in the paper
            (ALFWorld 256, WebShop and AppWorld 64). The rollout is split into as few mini-batches as this allows.
            `max_steps`, `logging_steps`, `eval_steps`, `save_steps` and the learning-rate schedule then count passes
            over a rollout, which are iterations with `num_iterations=1`. Needs
            `steps_per_generation=1` and `gradient_accumulation_steps=1`. `None`: `steps_per_generation` mini-batches.
        gamma: discount of the return gamma^(T-j+1) R, in (0, 1]. Some estimators do not use it, or have their own in
            `estimator_kwargs`: docs/method.md.
        value_lambda: how node values are computed. 1 (the paper): the mean return of a node's visits. Below 1, down to
            0: returns also use the values of the states that followed, which is less noisy if state keys show
            everything that matters, and biased if they do not. `g2po report` tests the keys of a run.
        advantage_estimator: `"g2po"`, or another name of `g2po_trl.credit.estimators.registry`; docs/method.md has
            their equations. An `advantage_fn` given to the trainer replaces it; the options of the built-in
            estimators are then refused.
        estimator_kwargs: options of the estimator, which are the parameters of its function; docs/method.md lists
            them. G2PO: `node_centric`, `edge_centric` and `aggregate`, `False` in the paper's ablations, and
            `episode_statistics`, `"trajectory"` (the paper's equations) or `"step"` (the released code; long episodes
            then weigh more). As a flag: JSON, `--estimator_kwargs '{"edge_centric": false}'`.
        step_advantage_weight: weight `w` of the step-level advantages: A = A_EP + w (A_NC + A_EC) for G2PO,
            A = A_EP + w A_S for GiGPO, A = A_EP + w A_D for GraphGPO and A = A_EP + w A_F for RewardFlow.
        state_key: which steps of a group are in the same state. `None`: those with equal keys, the environment's
            `Observation.state_key` or else the observation. `"similar"`: those whose keys share 90 % of their word
            bigrams (Jaccard similarity), `"similar:0.8"`: 80 %; needs the extra `similarity`. A function
            `Step -> str` is passed to the trainer instead. See `g2po_trl.credit.state_keys`.
        state_key_ignores: details to leave out of state keys: any of `"numbers"`, `"list_order"`, `"case"`.
        invalid_action_penalty: subtracted from the advantage of a completion without the required format.
        max_turns: maximum number of turns of an episode. An episode that reaches it ends as `truncated`.
        history: what a prompt shows of the episode. `"window"`: one message with the last `history_length` steps.
            `"conversation"`: all observations and completions in turns, as the chat template writes them. `None`: a
            conversation if the environment has tool methods, otherwise a window. Agents' own requests are always
            conversations.
        history_length: number of past steps (observation and action) in a prompt. Not used in conversations.
        max_prompt_length: maximum number of tokens of a prompt. Longer prompts lose their oldest history first, then
            the middle of the observation; an agent's own request that is too long ends its episode. `None`: no limit.
        eval_temperature: sampling temperature of evaluations; 0 is greedy.
        other_eval_temperatures: further temperatures at which each evaluation set is played; at 1.0, metrics have the
            prefix `eval_t1`. A gain at one temperature alone may only mean that the policy is less random.
        eval_top_p: `top_p` of evaluations. `None`: as in training.
        eval_top_k: `top_k` of evaluations. `None`: as in training.
        eval_seed: seed of the samples of evaluations, so that two evaluations can be compared; docs/evaluation.md
            lists what else must be equal.
        max_tokens_per_micro_batch: maximum number of tokens in one forward pass, padding included. Lower it if the
            update runs out of memory; the gradient does not change.
        token_layout: how step samples are arranged for the forward pass; loss and gradient are the same. `"shared"`:
            tokens that samples have in common are processed once, see `g2po_trl.update.packing`. `"packed"`:
            end to end, without padding. `"padded"`: one sample per row. If the model or its attention implementation
            does not support the others, `"padded"` is used.
        packed_row_tokens: maximum number of tokens per packed row. Longer rows repeat fewer tokens, and cost more
            attention. `None` picks what costs least for the model and the mini-batch. With several processes, rows
            are shortened if a mini-batch would give a process fewer than eight.
        generation_batch_tokens: maximum number of padded tokens (prompts and longest completions) in one generate
            call of a process. Not used with vLLM.
        rollout_strategy: which episodes a rollout plays, and when. `"synchronous"`: `num_generations` of each task,
            all to their ends, exactly on-policy. `"dynamic_sampling"`: groups whose rewards are all equal are replaced
            by groups of other tasks. `"partial_rollouts"` is experimental, see docs/experimental.md.
        rollout_strategy_kwargs: options of the strategy. Dynamic sampling: `max_generation_batches` (2), maximum
            number of groups played, as a multiple of those trained on; replaced groups count in success rates and
            costs. Partial rollouts: `max_off_policy_steps` (1), maximum age of a step, in policy updates. As a flag:
            JSON, `--rollout_strategy_kwargs '{"max_generation_batches": 3}'`.
        vllm_servers: addresses of vLLM servers that generate instead of the training processes, e.g.
            `["http://10.0.0.2:8000"]`; docs/gpus.md has the commands. A server that fails is left out until the next
            rollout. If none is left, the run waits `vllm_server_timeout` seconds for one, then stops.
        vllm_weights_folder: folder with the same path on the training machine and on `vllm_servers`, for the weights
            of each rollout. It belongs to one run. `None`: `_vllm_weights` in `output_dir`.
        vllm_request_timeout: seconds a completion of `vllm_servers` may take before its server counts as failed.
        vllm_merge_adapter: how a colocated vLLM gets a LoRA adapter. `False`: separate from the base weights, without
            loss; refused if vLLM cannot serve it (DoRA, `modules_to_save`, sleep mode, …). `True`: merged into vLLM's
            weights, which rounds it, but generates faster. `None`: merged if vLLM computes in float32 or cannot serve
            it; otherwise separate.
        task_error_patience: exclude a task after this many consecutive rollouts in which all its episodes ended in
            environment errors. Excluded tasks are listed when training ends.
        max_error_rate: stop the run if a larger fraction of a rollout's episodes ends in environment errors or before
            the first step.
        save_trajectories: write every trajectory to output_dir/trajectories.
        overwrite: delete the earlier run in `output_dir` when training begins: checkpoints, model, trajectories and
            evaluations, but no file that the run did not write. `False`: a new run in an occupied folder is refused.
        log_trajectories_every: iterations between tables of sample trajectories in Trackio, W&B or TensorBoard. 0:
            never. `None`: 10 if `report_to` names one of them.
        num_trajectories_logged: number of trajectories per logged table.
        vllm_importance_sampling_clip_max: largest importance weight of tokens sampled by another policy or engine.
            `None`: no limit. `"auto"`: TRL's 3, but 1 with partial rollouts and `"token_truncate"`.
        stop_sequences: strings at which a completion ends, e.g. `["</action>"]`. The string stays part of it.
        save_steps: optimizer steps between checkpoints. A checkpoint takes 12 bytes per parameter in float32 (6 GB for
            0.5 B). `None`: every tenth iteration, or with `load_best_model_at_end` at every evaluation; and at the
            end.
        save_total_limit: number of checkpoints to keep; with `load_best_model_at_end` the best one is kept as well.
        min_valid_action_ratio: stop the run if the fraction of completions with the required format, averaged over
            the last `collapse_patience` log lines, falls below this. 0: never.
        min_success_of_best: stop the run if the success rate, averaged over the last `collapse_patience` log lines,
            falls below this fraction of its best such average. 0: never.
        collapse_patience: number of log lines over which `min_valid_action_ratio` and `min_success_of_best` average.
    """

    beta: float = field(default=0.01, metadata={"help": "KL coefficient against the reference model."})
    logging_steps: float | None = field(
        default=None, metadata={"help": "Optimizer steps between log lines. None: one line per iteration."}
    )
    save_steps: float | None = field(
        default=None, metadata={"help": "Optimizer steps between checkpoints. None: every tenth iteration."}
    )
    save_total_limit: int | None = field(
        default=2, metadata={"help": "Checkpoints to keep, in addition to the best one."}
    )
    mini_batch_size: int | None = field(
        default=None, metadata={"help": "Maximum step samples of an optimizer step. None: see steps_per_generation."}
    )
    gamma: float = field(default=0.95, metadata={"help": "Discount of returns."})
    value_lambda: float = field(
        default=1.0, metadata={"help": "Node values: 1 (mean return) to 0 (values of next states)."}
    )
    advantage_estimator: str = field(default="g2po", metadata={"help": f"One of {', '.join(ESTIMATORS)}."})
    estimator_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the estimator, as JSON. docs/method.md lists them."}
    )
    step_advantage_weight: float = field(default=1.0, metadata={"help": "w in A = A_EP + w (A_NC + A_EC)."})
    state_key: str | None = field(
        default=None, metadata={"help": "None: equal keys are one state. similar, similar:0.8: similar ones too."}
    )
    state_key_ignores: list[str] | None = field(
        default=None, metadata={"help": f"Details to leave out of state keys: any of {', '.join(IGNORABLE)}."}
    )
    invalid_action_penalty: float = field(
        default=0.1, metadata={"help": "Subtracted for each completion without the required format."}
    )
    max_turns: int = field(default=50, metadata={"help": "Maximum number of turns of an episode."})
    history: str | None = field(
        default=None, metadata={"help": "window: the last steps in one message. conversation: all of them in turns."}
    )
    history_length: int = field(default=2, metadata={"help": "Number of past steps in a prompt."})
    max_prompt_length: int | None = field(default=2048, metadata={"help": "Maximum number of tokens of a prompt."})
    eval_temperature: float = field(default=0.4, metadata={"help": "Sampling temperature of evaluation."})
    other_eval_temperatures: list[float] = field(
        default_factory=list, metadata={"help": "Further temperatures at which each evaluation set is played."}
    )
    eval_top_p: float | None = field(default=None, metadata={"help": "top_p of evaluation. None: as in training."})
    eval_top_k: int | None = field(default=None, metadata={"help": "top_k of evaluation. None: as in training."})
    eval_seed: int = field(default=0, metadata={"help": "Seed of the samples of evaluations."})
    max_tokens_per_micro_batch: int = field(
        default=16384, metadata={"help": "Maximum number of tokens in a forward pass."}
    )
    token_layout: str = field(default="shared", metadata={"help": f"One of {', '.join(LAYOUTS)}."})
    packed_row_tokens: int | None = field(default=None, metadata={"help": "Maximum number of tokens per packed row."})
    generation_batch_tokens: int = field(
        default=65536, metadata={"help": "Maximum number of padded tokens in a generate call."}
    )
    rollout_strategy: str = field(
        default="synchronous",
        metadata={"help": "synchronous, dynamic_sampling or partial_rollouts."},
    )
    rollout_strategy_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the rollout strategy, as JSON."}
    )
    vllm_servers: list[str] | None = field(
        default=None, metadata={"help": "Addresses of vLLM servers that generate, e.g. http://10.0.0.2:8000."}
    )
    vllm_weights_folder: str | None = field(
        default=None, metadata={"help": "Shared folder for the weights of vllm_servers. None: in output_dir."}
    )
    vllm_request_timeout: float = field(
        default=600.0, metadata={"help": "Seconds a completion of vllm_servers may take."}
    )
    vllm_merge_adapter: bool | None = field(
        default=None, metadata={"help": "Merge a LoRA adapter into colocated vLLM's weights. None: if it must be."}
    )
    task_error_patience: int = field(
        default=2, metadata={"help": "Consecutive rollouts with only errors after which a task is excluded."}
    )
    max_error_rate: float = field(
        default=0.5, metadata={"help": "Stop the run above this fraction of failed episodes."}
    )
    save_trajectories: bool = field(default=True, metadata={"help": "Write trajectories to output_dir."})
    overwrite: bool = field(default=False, metadata={"help": "Delete the earlier run in output_dir."})
    log_trajectories_every: int | None = field(
        default=None,
        metadata={"help": "Iterations between tables of trajectories. None: 10 with Trackio, W&B or TensorBoard."},
    )
    num_trajectories_logged: int = field(default=4, metadata={"help": "Trajectories per logged table."})
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "One of token_truncate, token_mask, sequence_truncate, sequence_mask. None: sequence_mask, or "
            "token_truncate with partial rollouts."
        },
    )
    # A float, None or "auto"; the argument parser wants one type.
    vllm_importance_sampling_clip_max: str = field(
        default="auto", metadata={"help": "Largest ratio. None: no limit. auto: 3, or 1 with partial rollouts."}
    )
    min_valid_action_ratio: float = field(
        default=0.0, metadata={"help": "Stop the run below this fraction of well-formed completions. 0: never."}
    )
    min_success_of_best: float = field(
        default=0.0, metadata={"help": "Stop the run when success falls below this fraction of its best. 0: never."}
    )
    collapse_patience: int = field(default=5, metadata={"help": "Log lines over which the two limits above average."})

    def __post_init__(self):
        for name, value in vars(self).items():
            setattr(self, name, without_numpy(value))
        for name in ("estimator_kwargs", "rollout_strategy_kwargs", "lr_scheduler_kwargs"):
            setattr(self, name, as_mapping(name, getattr(self, name)))
        self.top_p = 1.0 if self.top_p is None else self.top_p  # so do scripts of TRL leave it out
        self.top_k = 0 if self.top_k is None else self.top_k  # transformers would make it 50
        self._check_estimator()
        check(self)
        if self.vllm_importance_sampling_mode is None:
            # The product of a completion's ratios says less and less, the older the policy that wrote it.
            self.vllm_importance_sampling_mode = "token_truncate" if self.is_off_policy else "sequence_mask"
        self.vllm_importance_sampling_clip_max = as_bound(self)
        if self.use_vllm and self.vllm_max_model_length is None and self.max_prompt_length is not None:
            self.vllm_max_model_length = self.max_prompt_length + self.max_completion_length
        # TRL wants whole groups in an evaluation batch; ours plays each panel row on its own.
        self.num_generations_eval = self.num_generations_eval or 1
        # Defaults that depend on what the parent works out: one line an iteration, a checkpoint every ten.
        logging_steps, self.logging_steps = self.logging_steps, self.logging_steps or 1
        save_steps, self.save_steps = self.save_steps, self.save_steps or 1
        eval_steps = self.eval_steps  # without one, the parent takes that of logging
        # The parent wants the best model's checkpoints at evaluations only; they may come more often.
        set_best_metric(self)
        load_best, self.load_best_model_at_end = self.load_best_model_at_end, False
        super().__post_init__()
        self.load_best_model_at_end = load_best
        if logging_steps is None:
            self.logging_steps = self.optimizer_steps_per_iteration
        if not eval_steps and self.eval_strategy == "steps":
            self.eval_steps = self.logging_steps
        if save_steps is None:
            self.save_steps = _ITERATIONS_PER_CHECKPOINT * self.optimizer_steps_per_iteration
            if load_best and self.eval_strategy == "steps":
                self.save_steps = self.eval_steps
        if self.log_trajectories_every is None:
            self.log_trajectories_every = 10 if logs_tables(self) else 0
        check_afterwards(self)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data, for files and loggers: without what looks like a secret."""
        return masked(super().to_dict())

    def _check_estimator(self) -> None:
        check_estimator(self)

    def check_advantage_fn(self) -> None:
        """Refuse what only the built-in estimators read: with an `advantage_fn` it would be ignored.

        Raises:
            ValueError: for the first such field that is not at its default.
        """
        check_advantage_fn(self)

    def training_sampling(self) -> Sampling:
        """Return how completions are sampled in rollouts."""
        return Sampling.of(self)

    def evaluation_sampling(self, temperature: float | None = None) -> Sampling:
        """Return how completions are sampled in evaluations.

        Args:
            temperature: `None`: `eval_temperature`.
        """
        of_evaluations = {one.name: getattr(self, f"eval_{one.name}", None) for one in fields(Sampling)}
        changes = {name: value for name, value in of_evaluations.items() if value is not None}
        return Sampling.of(self, **changes | ({} if temperature is None else {"temperature": temperature}))

    def make_estimator(self) -> Callable[[StateGraph], np.ndarray]:
        """Return the function `StateGraph -> (S,)` advantages that the fields select.

        Raises:
            ValueError: if `estimator_kwargs` has what the estimator does not take.
        """
        return make_estimator(
            self.advantage_estimator,
            self.estimator_kwargs,
            step_weight=self.step_advantage_weight,
            scale_by_std=self.scale_by_std,
            invalid_action_penalty=self.invalid_action_penalty,
            history_length=self.history_length,
        )

    @property
    def estimator_name(self) -> str:
        """Name of the estimator in tables, such as `g2po without A_EC`."""
        return estimator_name(self.advantage_estimator, self.estimator_kwargs, self.value_lambda)

    @property
    def is_off_policy(self) -> bool:
        """Whether steps may be trained on by a later policy than the one that they were sampled from."""
        return self.rollout_strategy == "partial_rollouts"

    @property
    def corrects_sampling(self) -> bool:
        """Whether completions come with log-probabilities of another engine or policy, for importance weights."""
        return self.use_vllm or self.vllm_servers is not None or self.is_off_policy

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """Steps that transformers counts (`global_step`) between two rollouts.

        A step is an optimizer step or, with `mini_batch_size`, a pass over the rollout.
        """
        return max(1, self.steps_per_generation * self.num_iterations // self.gradient_accumulation_steps)

    @property
    def scale_by_std(self) -> bool:
        return self.scale_rewards == "group"
