"""`G2POConfig`: TRL's `GRPOConfig` with the fields of agent training, the paper's values as defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import numpy as np
from trl import GRPOConfig

from .config_validation import check, check_estimator, check_inherited, inherited, inherited_help, logs_tables
from .credit.estimators.registry import ESTIMATORS, estimator_name, make_estimator
from .credit.graph import StateGraph
from .credit.state_keys import IGNORABLE
from .engines.registry import ENGINES
from .engines.sampling import Sampling, reshaping_options
from .environments.episode_limits import EpisodeLimits
from .environments.pool.limits import PoolLimits
from .rollout.strategy import STRATEGIES
from .update.tree import LAYOUTS
from .utils.errors import G2POError
from .utils.masking import masked
from .utils.options import choices_help, kwargs_help, option
from .utils.trl_compat import without_trls_intervals

_ITERATIONS_PER_CHECKPOINT = 10
_prompt = partial(option, group="Prompts and completions")
_advantage = partial(option, group="Advantages")
_update = partial(option, group="Update and memory")
_rollout = partial(option, group="Rollout and generation")
_evaluation = partial(option, group="Evaluation", resumable=True, read_again=True)
_errors = partial(option, group="Environment workers and errors", resumable=True)
_run = partial(option, group="Logs, checkpoints and stopping", resumable=True)
_interval = partial(_run, default=None, within="(0, inf)", read_again=True)


@dataclass
class G2POConfig(Sampling, PoolLimits, EpisodeLimits, GRPOConfig):
    """Arguments of [`G2POTrainer`].

    Batch sizes count *trajectories*: `per_device_train_batch_size` x processes x `steps_per_generation` trajectories
    are rolled out together, `num_generations` of each task (one group). Their step samples are randomly split into
    `steps_per_generation` mini-batches, in blocks of samples with a common prefix, of at most an eighth of a
    mini-batch (conversations may be longer). Each mini-batch is split into micro-batches of at most
    `max_tokens_per_micro_batch` tokens. With `gradient_accumulation_steps=1` an iteration makes `steps_per_generation`
    optimizer steps. `mini_batch_size` sets the size of the mini-batches instead of their number.

    `g2po train TARGET --help-all` describes all fields.
    """

    inherited_help: ClassVar[dict[str, str]] = inherited_help()  # read by `cli.parser`

    beta: float = _update("KL coefficient against the reference model.", 0.01, within="[0, inf)")
    logging_steps: float | None = _interval("Optimizer steps between log lines. `None`: one line per iteration.")
    save_steps: float | None = _interval(
        "Optimizer steps between checkpoints, of 12 bytes per trained parameter in float32. `None`: every tenth "
        "iteration, or with `load_best_model_at_end` at every evaluation; and at the end."
    )
    eval_steps: float | None = _interval("Optimizer steps between evaluations. `None`: `logging_steps`.")
    save_total_limit: int | None = _run(
        "Number of checkpoints to keep; with `load_best_model_at_end` also the best one.", 2, read_again=True
    )
    num_generations: int = _rollout("Number of episodes of a task, which are one group.", 8, within="[2, inf)")
    mini_batch_size: int | None = _update(
        "Maximum number of step samples of an optimizer step, over all processes. `max_steps`, `logging_steps`, "
        "`eval_steps`, `save_steps` and the learning-rate schedule then count passes over a rollout, which are "
        "iterations with `num_iterations=1`. Needs `steps_per_generation=1` and `gradient_accumulation_steps=1`. "
        "`None`: `steps_per_generation` mini-batches.",
        None,
        within="[1, inf)",
    )
    gamma: float = _advantage(
        "Discount of the return gamma^(T-j+1) R. Some estimators do not use it, or have one of their own.",
        0.95,
        within="(0, 1]",
    )
    value_lambda: float = _advantage(
        "How node values are computed. 1 (the paper): the mean return of a node's visits. Below 1, returns also "
        "use the values of the states that followed: less noisy if state keys show everything that matters, "
        "otherwise biased.",
        1.0,
        within="[0, 1]",
        of_graph=True,
    )
    advantage_estimator: str = _advantage(
        "How advantages are estimated. An `advantage_fn` given to the trainer replaces it.",
        "g2po",
        choices=tuple(ESTIMATORS),
        of_estimator=True,
    )
    estimator_kwargs: dict[str, Any] | str | None = _advantage(
        "Parameters of the estimator's function, for G2PO such as "
        '`{"edge_centric": false}` or `{"episode_statistics": "step"}`. As a flag: JSON.',
        None,
        of_estimator=True,
        of_graph=True,
    )
    step_advantage_weight: float = _advantage(
        "Weight `w` of the step-level advantages: A = A_EP + w (A_NC + A_EC) for G2PO.",
        1.0,
        within="[0, inf)",
        of_estimator=True,
        of_graph=True,
    )
    state_key: str | None = _advantage(
        "Which steps of a group are in the same state. `None`: those with equal `Observation.state_key`, or else "
        'equal observations. `"similar:0.9"`: those whose keys share 90 % of their word bigrams; needs the extra '
        '`similarity`. `"workspace"` (files and last exit code), `"files"`, `"messages"`: those with an equal part of '
        "the key of an agent with a workspace.",
        None,
        of_graph=True,
    )
    state_key_ignores: list[str] | None = _advantage(
        'Details to leave out of state keys: any of `"numbers"`, `"case"`.',
        None,
        choices=IGNORABLE,
        of_graph=True,
    )
    invalid_action_penalty: float = _advantage(
        "Subtracted from the advantage of a completion without the required format.",
        0.1,
        within="[0, inf)",
        of_estimator=True,
    )
    history: str | None = _prompt(
        'What a prompt shows of the episode. `"window"`: one message with the last `history_length` steps. '
        '`"conversation"`: all observations and completions in turns. `None`: a conversation if the environment has '
        "tool methods, otherwise a window. Agents' own requests are always conversations.",
        None,
        choices=("window", "conversation"),
        plays=True,
    )
    history_length: int = _prompt(
        "Number of past steps (observation and action) in a prompt. Not used in conversations.",
        2,
        within="[0, inf)",
        plays=True,
    )
    max_prompt_length: int | None = _prompt(
        "Maximum number of tokens of a prompt. Longer prompts lose their oldest history first, then the middle of "
        "the observation; an agent's own request that is too long ends its episode. `None`: no limit.",
        2048,
        within="[1, inf)",
        plays=True,
    )
    eval_temperature: float = _evaluation("Sampling temperature of evaluations; 0 is greedy.", 0.4, within="[0, inf)")
    other_eval_temperatures: list[float] = _evaluation(
        "Further temperatures at which each evaluation set is played; at 1.0, metrics have the prefix `eval_t1`.",
        [],
    )
    eval_top_p: float | None = _evaluation("`top_p` of evaluations. `None`: as in training.", None, within="(0, 1]")
    eval_top_k: int | None = _evaluation("`top_k` of evaluations. `None`: as in training.", None, within="[0, inf)")
    eval_seed: int = _evaluation(
        "Seed of the samples of evaluations. Only evaluations of one seed can be compared.", 0
    )
    max_tokens_per_micro_batch: int = _update(
        "Maximum number of tokens in one forward pass, padding included; the gradient does not depend on it. A longer "
        "sample has a pass of its own, with `token_layout: shared` of up to 1.5 times its tokens.",
        16384,
        within="[1, inf)",
        resumable=True,
    )
    token_layout: str = _update(
        'How step samples are arranged for the forward pass; loss and gradient are the same. `"shared"`: tokens '
        'that samples have in common are processed once. `"padded"`: one sample per row. What the model does not '
        "support is replaced, with a message.",
        "shared",
        choices=LAYOUTS,
        resumable=True,
    )
    old_log_probs: str = _update(
        'Log-probabilities before an update of several optimizer steps. `"trainer"`: of a forward pass. `"auto"`: of '
        "the engine as it sampled, without that pass, if it is the model itself, in float32.",
        "trainer",
        choices=("trainer", "auto"),
    )
    generation_batch_tokens: int = _rollout(
        "Maximum number of padded tokens in one generate call of a process. Not used with vLLM.",
        65536,
        within="[1, inf)",
        resumable=True,
    )
    engine: str = _rollout(
        f"What generates completions. {choices_help(ENGINES)}", "transformers", choices=tuple(ENGINES)
    )
    engine_kwargs: dict[str, Any] | str | None = _rollout(
        f"Options of the engine. {kwargs_help(ENGINES)}", None, resumable=True
    )
    rollout_strategy: str = _rollout(
        f"Which episodes are played. {choices_help(STRATEGIES)}", "synchronous", choices=tuple(STRATEGIES)
    )
    rollout_strategy_kwargs: dict[str, Any] | str | None = _rollout(
        f"Options of the strategy. {kwargs_help(STRATEGIES)}", None
    )
    task_error_patience: int = _errors(
        "Exclude a task after this many consecutive rollouts in which all its episodes ended in environment errors.",
        2,
        within="[1, inf)",
    )
    max_error_rate: float = _errors(
        "Stop the run if a larger fraction of a rollout's episodes ends in environment errors or before the first "
        "step.",
        0.5,
        within="[0, 1]",
        read_again=True,
    )
    save_trajectories: bool = _run("Write every trajectory to output_dir/trajectories.", True)
    overwrite: bool = _run(
        "Delete what the earlier run in `output_dir` wrote, when training begins. `False`: refuse an occupied folder.",
        False,
        read_again=True,
    )
    log_trajectories_every: int | None = _run(
        "Iterations between tables of sample trajectories in Trackio, W&B or TensorBoard. 0: never. `None`: 10 if "
        "`report_to` names one of them.",
        None,
        within="[0, inf)",
    )
    min_valid_action_ratio: float = _run(
        "Stop the run if the fraction of completions with the required format, averaged over the last five log "
        "lines, falls below this. 0: never.",
        0.0,
        within="[0, 1]",
    )

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # of a sweep; no file of a run could hold it
                setattr(self, name, value.item())
        self.top_p = 1.0 if self.top_p is None else self.top_p  # so do scripts of TRL leave it out
        self.top_k = 0 if self.top_k is None else self.top_k  # transformers would make it 50
        # TRL wants whole groups in an evaluation batch; here each panel row is played on its own.
        self.num_generations_eval = 1 if self.num_generations_eval is None else self.num_generations_eval
        check_inherited(self)
        try:
            with without_trls_intervals(self):
                super().__post_init__()
        except ValueError as error:  # of TRL and transformers
            raise error if isinstance(error, G2POError) else G2POError(str(error)) from error
        # Fields whose `None` means that they follow others.
        steps, by_steps = self.optimizer_steps_per_iteration, self.eval_strategy == "steps"
        if self.logging_steps is None:
            self.logging_steps = steps
        if self.eval_steps is None and by_steps:
            self.eval_steps = self.logging_steps
        if self.save_steps is None:
            is_best = self.load_best_model_at_end and by_steps
            self.save_steps = self.eval_steps if is_best else _ITERATIONS_PER_CHECKPOINT * steps
        if self.log_trajectories_every is None:
            self.log_trajectories_every = 10 if logs_tables(self) else 0
        if self.use_vllm and self.vllm_max_model_length is None and self.max_prompt_length is not None:
            self.vllm_max_model_length = self.max_prompt_length + self.max_completion_length
        self._check_estimator()
        check(self)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data for files and loggers; values that look like secrets are masked."""
        return masked(super().to_dict())

    _check_estimator = check_estimator

    @classmethod
    def fields_with(cls, key: str, value: Any = True) -> list[str]:
        """Return the names of fields, inherited ones included, with an entry in their metadata; see `option`."""
        known = inherited(key)
        return [one.name for one in fields(cls) if one.metadata.get(key, known.get(one.name)) == value]

    def evaluation_sampling(self, temperature: float | None = None) -> Sampling:
        """Return how completions are sampled in evaluations, by default at `eval_temperature`."""
        of_evaluations = {one.name: getattr(self, f"eval_{one.name}", None) for one in fields(Sampling)}
        changes = {name: value for name, value in of_evaluations.items() if value is not None}
        return Sampling.of(self, **changes | ({} if temperature is None else {"temperature": temperature}))

    def make_estimator(self) -> Callable[[StateGraph], np.ndarray]:
        """Return the function `StateGraph -> (S,)` advantages that the fields select.

        Raises:
            G2POError: if `estimator_kwargs` has an option that the estimator does not have, or a value out of range.
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
    def corrects_sampling(self) -> bool:
        """Whether completions carry the log-probabilities of another engine or policy, for importance weights."""
        return not ENGINES[self.engine].load().is_the_model

    @property
    def reshaping(self) -> dict[str, Any]:
        """The settings because of which completions are not sampled from the model's whole distribution."""
        regex = self.vllm_structured_outputs_regex
        of_regex = {} if regex is None else {"vllm_structured_outputs_regex": regex}
        return self.filters() | reshaping_options(self.generation_kwargs or {}) | of_regex

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """Number of steps between two rollouts, as transformers counts them (`global_step`).

        A step is an optimizer step or, with `mini_batch_size`, a pass over the rollout.
        """
        return max(1, self.steps_per_generation * self.num_iterations // self.gradient_accumulation_steps)

    @property
    def scale_by_std(self) -> bool:
        return self.scale_rewards == "group"
