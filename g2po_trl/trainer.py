"""`G2POTrainer`: TRL's `GRPOTrainer` with a multi-turn rollout and graph advantages.

Four things differ from GRPO:
1. a group consists of episodes in an environment, each with many completions (`strategy`, `player`);
2. each step of an episode (one prompt, one completion) is a training sample, a *step sample*, so the number of samples
   varies between rollouts;
3. the advantage of a step comes from the state graph of its group, not from the reward alone (`credit`);
4. step samples are split into micro-batches by tokens, inside one training step (`update`).
The loss is TRL's own. The methods here are hooks of TRL and transformers. They delegate to the parts in brackets.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model, send_to_device
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProcessorMixin, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from .config import G2POConfig
from .credit.assignment import Credit, advantages_of_rank, groups_of
from .credit.graph import StateGraph
from .credit.state_keys import PARTS
from .engines.base import Engine, EngineParts
from .engines.registry import ENGINES
from .engines.sampling import Sampling
from .engines.stop_tokens import end_completions
from .environments.contract import Observation, TextEnvironment
from .environments.episode_limits import EpisodeLimits
from .environments.setup import Setup, agent_factory, check_start
from .environments.several import mixed
from .environments.tasks import check_rows, decoded, panels_of, tasks_hash
from .environments.tools.trl_rewards import with_rewards
from .prompts.conversation import pictures_of
from .prompts.images import ImageInputs
from .prompts.template import PromptTemplate
from .prompts.tokenization import DATE, get_chat_template, get_tokenizer
from .rollout.actor import PromptActor
from .rollout.conversations import request_of
from .rollout.episode import Episode
from .rollout.failing_tasks import TaskErrors
from .rollout.player import Player
from .rollout.stats import RolloutStats
from .rollout.strategy import STRATEGIES, Rollout, RolloutContext
from .rollout.task_sampler import TaskSampler
from .runs import callbacks, hub
from .runs.checkpoint import AtomicCheckpoint, RunState, WeightCheck, load_weights
from .runs.metrics import Summary, advantage_metrics, flat
from .runs.model_card import card_of
from .runs.output_dir import RunFolder
from .runs.panel import PanelEvaluation, check_evaluations, panels_by_prefix
from .runs.run_json import describe_run, identity_of, read_run
from .runs.sample_table import SampleTable
from .runs.summary import at_temperature
from .runs.verdict import Tally
from .trainer_validation import (
    check_arguments,
    check_errors,
    check_not_imported,
    check_trainer,
    warn_of_ignored_fields,
)
from .trajectory import Step, Trajectory, note_advantages
from .update.batch import StepBatch
from .update.iteration import Iteration, Timer
from .update.policy.reference import AdapterReference, ReferenceState
from .update.policy.start_check import StartCheck, sample_conversation
from .update.update import MiniBatches, Update, set_optimizer_mode
from .utils.adapters import find_adapter, load_adapter_to_train, only_active_adapter
from .utils.forward_pass import context_length, keep_outputs_exact, precision_of, without_randomness
from .utils.json import atomic_write
from .utils.options import require
from .utils.ranks import any_rank, on_main
from .utils.trl_compat import gather_params_of, is_sharded, reference_copied_from, trained_model_for_generation


def _no_reward_function(**kwargs):
    """Stand in for the reward function that `GRPOTrainer.__init__` requires; rewards come from the environment."""
    raise RuntimeError("rewards come from the environment; this function is never called")


class G2POTrainer(GRPOTrainer):
    """Trains a language model as an agent with G2PO.

    Group-Graph Policy Optimization: [arXiv:2606.22995](https://arxiv.org/abs/2606.22995).

    Args:
        model: a model id, a path, or a model. With `beta` above 0 and no adapter, the reference model is loaded from
            the same place, or a copy of the model.
        args: the configuration.
        train_dataset: one task per row; its columns are the keyword arguments of the environment's `reset`. A column
            `task_id` names the task in trajectories; success is also reported by `task_type`.
        eval_dataset: the evaluation set: `evaluate` plays all of its tasks.
        environment_factory: makes a `TextEnvironment`, in worker processes: a class, a function or a
            `functools.partial`, picklable by cloudpickle. A class with tool methods and `get_reward`, as for TRL, is
            accepted too, and so is a dictionary of several: the column `environment` of a task names one.
        prompt_template: wording of the prompt and parser of the completion, or a dictionary. Default: the environment
            class's `prompt_template`, or else `TOOL_PROMPT` (a class with tool methods) or `DEFAULT_PROMPT`.
        advantage_fn: `StateGraph -> (S,)`, replaces `advantage_estimator` and its options.
        state_key: `Step -> str`, replaces the environment's own state key. Excludes the configuration's `state_key`.
            With `agent`: a function of a request's messages.
        processing_class: the tokenizer, with a chat template; for a multimodal checkpoint, its processor.
        card_facts: additional rows of the model card, e.g. the version of the data.
        agent: instead of an environment, a function `agent(task, client)` that calls the model through OpenAI's
            protocol and returns a reward; an `AgentCommand`; or its name, `file.py:NAME`. Each request is a step.
            For several agents, pass a dictionary, as for environments.
        reward_funcs: for tool-based classes, as in `GRPOTrainer`, but called in the worker with lists of one episode.
            Their sum, weighted by `reward_weights`, is added to `get_reward()`.
        tools: functions that the model may call, as in `GRPOTrainer`. Without `environment_factory` these are
            the only tools.
        callbacks, optimizers, peft_config, quantization_config: as in `GRPOTrainer`.

    Raises:
        G2POError: if the dataset lacks columns that `reset` needs, the tokenizer has no chat template, the output
            folder cannot be written, or the environment violates its contract on the first task.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "g2po"]
    _name = "G2PO"

    def __init__(
        self,
        model,
        args: G2POConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        environment_factory: Callable[[], TextEnvironment] | dict[str, Callable] | None = None,
        prompt_template: PromptTemplate | dict[str, PromptTemplate] | None = None,
        advantage_fn: Callable[[StateGraph], np.ndarray] | None = None,
        state_key: Callable[[Step], str] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        card_facts: dict[str, str] | None = None,
        agent: Callable | str | dict[str, Callable | str] | None = None,
        reward_funcs: Callable | Sequence[Callable] | None = None,
        tools: Sequence[Callable] | None = None,
        **kwargs,
    ):
        check_not_imported()
        args = args or G2POConfig("g2po-output")
        if not isinstance(args, G2POConfig):
            raise TypeError(f"args is a {type(args).__name__}; G2POTrainer needs a G2POConfig")
        if agent is not None:
            environment_factory, state_key = agent_factory(agent, args.max_turns, state_key, environment_factory), None
        environment_factory = with_rewards(mixed(environment_factory), reward_funcs, args.reward_weights, tools)
        check_arguments(model, args, kwargs, environment_factory, advantage_fn, state_key)
        self.environment_factory = environment_factory
        self.setup = setup = Setup(
            environment_factory, EpisodeLimits.of(args), prompt_template, args.history, train_dataset, eval_dataset
        )
        check_evaluations(args, eval_dataset, type(self).evaluate is G2POTrainer.evaluate)
        self._staging = AtomicCheckpoint()
        name = model
        model, processing_class = load_adapter_to_train(name, args, kwargs, processing_class)
        with (
            ENGINES[args.engine].load().starting(args, **args.engine_kwargs or {}),
            reference_copied_from(model, args, loaded=model is not name),
        ):
            super().__init__(
                model=model,
                reward_funcs=[_no_reward_function] * len(args.reward_weights or [1]),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                **kwargs,
            )
        self.beta = args.beta
        self.sampling = Sampling.of(args)
        self.use_vllm = args.corrects_sampling  # without it TRL's loss ignores importance weights
        check_trainer(self)
        of_template = args.chat_template_kwargs, args.stop_sequences
        self.eos_token_ids = end_completions(self.processing_class, self.model, self.eos_token_ids, *of_template)
        if DATE in str(get_chat_template(self.processing_class)):  # the run's, also on the next day
            run = read_run(str(args.resume_from_checkpoint)) or read_run(args.output_dir)
            earlier = run.get("play", {}).get("chat_template_kwargs") or {}
            today = {DATE: earlier.get(DATE, date.today().isoformat())}
            args.chat_template_kwargs = today | (args.chat_template_kwargs or {})
        self._made_with = {name: copy.deepcopy(getattr(args, name)) for name in args.fields_with("read_again", False)}
        self.card_facts = card_facts or {}
        self.log_completions = False  # TRL's table of prompts, which would be empty
        own_name = getattr(advantage_fn, "__name__", type(advantage_fn).__name__)
        self.estimator_name = args.estimator_name if advantage_fn is None else own_name
        self.credit = Credit.of(args, advantage_fn or args.make_estimator(), state_key, gather_object)
        self.update = self.make_update()
        self.task_errors = TaskErrors(args.task_error_patience)
        self.tally = Tally()
        self.verdict = callbacks.ClosingVerdict(self.tally, self.estimator_name, self.task_errors)
        template, accelerator = setup.prompt_template, self.accelerator
        longest = {"history": setup.history, "context_length": context_length(self.model.config)}
        actor = PromptActor.of(args, self.make_engine(), self.processing_class, template, **longest)
        on_any = partial(any_rank, accelerator)
        self.player = Player.of(args, setup.factory, actor, excluded=self.task_errors, any_running=on_any)
        bar = partial(self._bar, "rollout")
        context = RolloutContext(
            self.player, args.num_generations, self.train_dataset, args.seed, self.sampling, gather_object, bar
        )
        self.strategy = STRATEGIES[args.rollout_strategy].load()(context, **args.rollout_strategy_kwargs or {})
        sample = sample_conversation(actor.encode, template.messages("observation", "task"))
        self.start_check = StartCheck(self.update, sample, not args.reshaping)
        self._read_starts(check_start(self.player.pool, setup.first_tasks))
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        self.folder = RunFolder(args.output_dir, args.save_trajectories, rank, num_ranks)
        self.panels = PanelEvaluation(args, self.play, self._policy_in_engine, self.folder, accelerator)
        self.iteration = Iteration(args.steps_per_generation, self.num_iterations, self._metrics["train"])
        self.weight_check = WeightCheck(
            lambda: accelerator.unwrap_model(self.model), gather_params_of(self), accelerator.device
        )
        parts = {
            "digests": self.weight_check,
            "iteration": self.iteration,
            "evaluations": self.folder,
            "task_errors": self.task_errors,
            "tally": self.tally,
            "layout": self.update.layout,
        }
        self.resumption = RunState(parts, rank, num_ranks)
        self._keep_reference()
        self.sample_table = SampleTable(args.log_trajectories_every, self.callback_handler.callbacks)
        self._add_callbacks()

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def is_partitioned(self) -> bool:
        """Whether FSDP or DeepSpeed divides weights, gradients or the optimizer's state among ranks."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def make_engine(self) -> Engine:
        """Return the configured engine."""
        parts = EngineParts(
            self.args,
            get_tokenizer(self.processing_class),
            self.eos_token_ids,
            self.accelerator,
            model=lambda: self.accelerator.unwrap_model(self.model),
            generation_model=partial(trained_model_for_generation, self),
            gather=gather_params_of(self),
            is_sharded=self.is_partitioned,
            vllm=getattr(self, "vllm_generation", None),
            image_inputs=self.update.layout.image_inputs,
        )
        return ENGINES[self.args.engine].load().of_trainer(parts, **self.args.engine_kwargs or {})

    def make_update(self) -> Update:
        """Return the configured update of the model."""
        is_adapter = self.beta != 0.0 and is_peft_model(self.model)
        reference = AdapterReference(self.model, gather_params_of(self)) if is_adapter else self.ref_model
        return Update.of(
            self.args,
            self.model,
            self.accelerator,
            get_tokenizer(self.processing_class).pad_token_id,
            reference,
            ImageInputs.of(self.processing_class, self.model),
        )

    def _read_starts(self, starts: Sequence[Observation]) -> None:
        """Choose chat templates by the first observations of tasks; of images, check one with model and engine."""
        actor = self.player.actor
        for first in starts:
            actor.choose_template(first)
            if self.args.state_key in PARTS:  # of a key that not every environment has
                self.credit.state_key(Step(first.text, "", state_key=first.state_key))
        seen = next((first for first in starts if first.images), None)
        if seen is not None:
            self.update.layout.notice_images()
            messages = request_of(Episode("", observation=seen), self.setup.prompt_template).messages
            self.start_check.sample = sample_conversation(actor.encode, messages, pictures_of(messages))

    def _keep_reference(self) -> None:
        """Let checkpoints keep the reference: an adapter's, or a model of its own that is not sharded."""
        reference = self.update.log_probs.reference
        if isinstance(reference, AdapterReference):
            self.resumption.kept_in_files.append(reference)
        if self.ref_model is not None and not is_sharded(self):
            state = ReferenceState(self.accelerator.unwrap_model(self.ref_model), self.args.sync_ref_model)
            self.resumption.parts["reference"] = state
            self.resumption.kept_in_files.append(state)

    def _add_callbacks(self) -> None:
        """Replace transformers' log lines by callbacks that report progress and stop a collapsed run."""
        args, is_main = self.args, self.accelerator.is_main_process
        if is_main and not torch.accelerator.is_available():
            print("No GPU found: training on the CPU.", flush=True)
        if is_main and not args.disable_tqdm:
            episodes = args.per_device_train_batch_size * args.steps_per_generation
            print(self.player.pool.describe(episodes), flush=True)
        for theirs in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):  # the first is another in notebooks
            self.remove_callback(theirs)
        progress = callbacks.IterationProgressCallback(args.optimizer_steps_per_iteration)
        own = [self.weight_check, self.start_check, self.verdict, *[progress] * (not args.disable_tqdm)]
        own += [callbacks.CollapseStoppingCallback(args.min_valid_action_ratio), self.sample_table]
        for callback in (*own, callbacks.LogFile(self.folder), callbacks.OwnSchedule()):
            self.add_callback(callback)

    def describe(self) -> dict[str, Any]:
        """Return the run's description, see `describe_run`."""
        precision = precision_of(self.accelerator.unwrap_model(self.model), self.accelerator)
        return describe_run(
            self.args,
            self.environment_factory,
            self.setup.prompt_template,
            self.estimator_name,
            play={**precision, "history": self.setup.history},
            model=self.model.config.name_or_path,
            chat_template=self.player.actor.describe_template(),
            training_tasks=self.tasks_hash,
        )

    def _write_run(self) -> None:
        self.folder.write_run(self.describe(), panels_of(self.eval_dataset))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as transformers does, before any model is prepared, including the reference."""
        super().create_accelerator_and_postprocess()
        keep_outputs_exact(self.accelerator)

    def estimate_advantages(self, graph: StateGraph, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Return (S,) advantages of the steps of all ranks. A subclass may override this.

        Args:
            graph: the state graph of all ranks' trajectories.
            trajectories: this rank's trajectories, for data that the graph does not contain, such as token ids.
        """
        return self.credit.estimator(graph)

    # -- rollout ---------------------------------------------------------------------------------------------------

    def play(
        self,
        tasks: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        groups: Sequence[int] | None = None,
        description: str = "rollout",
        seeds: Sequence[int] | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each task with the current policy, on this rank. All ranks must call it together.

        Args:
            tasks: dataset rows.
            sampling: default: as in training. For another temperature: `replace(trainer.sampling, temperature=0)`.
            groups: group of each task, see `Player.play`.
            description: label of the progress bar.
            seeds: seed of each episode, see `Player.play`.

        Returns:
            The trajectories, in the order of the tasks, and the statistics of this rank's rollout.
        """
        with self._bar(description) as bar, self._policy_in_engine():
            return self.player.play(tasks, sampling or self.sampling, groups, seeds, bar)

    def _bar(self, description: str) -> AbstractContextManager[Callable[[int, int], None]]:
        return callbacks.rollout_bar(description, self.player.max_turns, self.accelerator.is_main_process)

    def _policy_in_engine(self) -> AbstractContextManager[None]:
        """Return a context in which the engine has the current weights, sent once for several `play` calls."""
        is_ready = self.state.max_steps > 0 or not self.is_partitioned
        remedy = "a sharded model cannot play before `train`, in which this option evaluates: set it to True"
        require(is_ready, "eval_on_start", self.args.eval_on_start, remedy)
        return self.player.rollout()

    def _roll_out(self, rows: list[dict[str, Any]]) -> MiniBatches:
        """Play a rollout and return its mini-batches: trajectories -> graph -> advantages -> step batch."""
        first_row = self.accelerator.process_index * len(rows)  # this rank's, among those of all ranks
        # `num_generations` consecutive rows are one group.
        groups = [(first_row + i) // self.args.num_generations for i in range(len(rows))]
        with self._policy_in_engine(), self.start_check.watching(self.player.actor.engine):
            rollout = self.strategy.collect(rows, groups, self.iteration.number)
        self.start_check.compare_engine(self.model, rollout.all)
        trajectories = rollout.trajectories  # one per row; the strategy may have played other tasks
        clock = Timer()
        # Of all ranks: a group may be spread over ranks, so each rank builds the whole graph.
        records = self.credit.records(trajectories, groups)
        replaced = self.credit.records(rollout.replaced, rollout.replaced_groups)
        self.task_errors.count(records + replaced)
        check_errors(records + replaced, rollout.errors, self.args.max_error_rate)
        if self.accelerator.is_main_process:
            warn_of_ignored_fields(trajectories)
        graph = self.credit.graph(records)
        advantages = np.asarray(self.estimate_advantages(graph, trajectories), dtype=np.float64)
        local_advantages = advantages_of_rank(advantages, records, first_row, len(trajectories))
        clock.record("time/advantage")

        note_advantages(trajectories, local_advantages, groups)
        batch = StepBatch.from_trajectories(trajectories, local_advantages, self.args.mask_truncated_completions)
        mini_batches, update_metrics = self.update.make_mini_batches(self.model, batch, self.iteration.step)
        optimizer_steps = len(mini_batches) * self.num_iterations / self.args.gradient_accumulation_steps
        update_metrics["update/optimizer_steps"] = optimizer_steps
        clock.record("time/batch")
        self._add_log_probs(mini_batches)
        clock.record("time/logps")
        overridden = type(self).estimate_advantages is not G2POTrainer.estimate_advantages
        of_estimator = advantage_metrics(graph, advantages, None if overridden else self.credit.estimator)
        summary = self._log_rollout(rollout, graph, {**clock.seconds, **of_estimator, **update_metrics})
        self.tally.add(groups_of(records, self.args.num_generations), summary)
        return mini_batches

    def _add_log_probs(self, mini_batches: MiniBatches) -> None:
        """Add the old log-probabilities, if the loss cannot use its own, and the reference's, if `beta` is above 0."""
        micro_batches = [micro_batch for part in mini_batches for micro_batch in part]
        self.iteration.log(self.update.log_probs.add(self.model, micro_batches))

    # -- training --------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs):
        """Move a micro-batch to the device without transformers' cast of floats to DeepSpeed's dtype."""
        if not isinstance(inputs, dict):
            raise TypeError("G2POTrainer has no prediction on single batches: use `evaluate` or `play`")
        return send_to_device(inputs, self.accelerator.device)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Play a rollout if needed, and train on its next mini-batch, or with `mini_batch_size` on all of them."""
        iteration = self.iteration
        set_optimizer_mode(self.optimizer, training=True)  # before the rollout: these weights play and are trained
        if iteration.is_complete or not iteration.mini_batches:
            iteration.mini_batches = self._roll_out([decoded(row) for row in inputs])

        def forward_backward(micro_batch: dict[str, Any]) -> torch.Tensor:
            # Not TRL's `training_step`: it counts each call as a step.
            return Trainer.training_step(self, model, micro_batch, num_items_in_batch)

        started = time.perf_counter()
        losses = []
        with iteration.merged_metrics():
            for mini_batch in iteration.current_mini_batches:
                if losses:
                    self._step_optimizer(model)
                losses.append(self.update.backward(model, mini_batch, forward_backward))
        loss = sum(losses) / len(losses)
        iteration.advance(time.perf_counter() - started)
        if iteration.is_complete and not self.update.log_probs.needs_old_log_probs:
            iteration.log(self.update.log_probs.metrics())
        return loss

    def _step_optimizer(self, model: torch.nn.Module) -> None:
        """Make the optimizer step between two mini-batches, as transformers does after a training step's last one."""
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = super()._get_grad_norm(model, norm)
        self.iteration.grad_norms += [] if norm is None else [float(norm)]  # DeepSpeed may keep none
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        model.zero_grad()
        self.iteration.inner_steps += 1

    def _get_grad_norm(self, model, grad_norm=None):
        """Return the gradient norm that transformers logs: with `mini_batch_size` the mean over optimizer steps."""
        norm, earlier = super()._get_grad_norm(model, grad_norm), self.iteration.grad_norms
        self.iteration.grad_norms = []
        return (sum(earlier) + float(norm)) / (len(earlier) + 1) if earlier else norm

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return TRL's loss of a micro-batch, scaled so that the losses of a mini-batch can be summed."""
        without_randomness(self.model)
        with self.update.log_probs.updating(inputs):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * inputs["loss_scale"]

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=False, **kwargs
    ):
        """Return log-probabilities and entropies of a micro-batch, computed in its layout.

        `Layout.of` has the tokens as the model reads them; `input_ids` are the same ones, padded.
        """
        computed = self.update.layout.log_probs(model, attention_mask[:, -logits_to_keep:], compute_entropy)
        if computed is not None:
            outputs = (*computed, None)
        else:
            outputs = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=compute_entropy, **kwargs
            )
        self.update.log_probs.record(outputs[0])
        return outputs

    # -- metrics ---------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs` and, in training mode, the metrics measured since the last time."""
        if self.model.training:
            self.iteration.merge_training_steps()
        super().log(logs, start_time)

    def _log_rollout(self, rollout: Rollout, graph: StateGraph, metrics: dict[str, float]) -> Summary:
        """Log and save a rollout, and return the sums of all ranks' episodes. Times are those of the slowest rank."""
        ranks = gather_object([(Summary.of(rollout.all), rollout.stats, metrics)])
        summary = Summary.merge(part for part, _, _ in ranks)
        stats = RolloutStats.over_ranks([part for _, part, _ in ranks])
        slowest = {name: max(part[name] for _, _, part in ranks) for name in metrics if name.startswith("time/")}
        self.iteration.log(
            {
                "rollout/episodes": summary.episodes,
                **{f"episode/{name}": value for name, value in flat(summary.means()).items()},
                **{f"graph/{name}": value for name, value in graph.statistics().items()},
                **stats.metrics(),
                **metrics,
                **slowest,
                "episode/tasks_set_aside": len(self.task_errors.excluded),
            }
        )
        self.state.num_input_tokens_seen += stats.prompt_tokens + stats.generated_tokens
        self.sample_table.offer(rollout.trajectories, self.iteration.number)
        self.folder.add_rollout(self.iteration.number, rollout.trajectories, rollout.replaced)
        return summary

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Play every task of an evaluation set `num_generations_eval` times, at `eval_temperature`, from `eval_seed`.

        It is first played at each of `other_eval_temperatures`: metrics at 1.0 have the prefix `eval_t1`.

        Args:
            eval_dataset: tasks, their name in a dictionary, or a dictionary of tasks. Default: the trainer's.
            ignore_keys: not used.
            metric_key_prefix: prefix of the metrics, and the set's name in files. "train" and "replaced" are taken.

        Returns:
            `eval_success_rate`, `eval_success_rate/<task_type>`, `eval_reward`, `eval_turns`, …; also appended to
            `evaluations.jsonl` in `output_dir`, with the trajectories in `trajectories/`.
        """
        metrics = {}
        for prefix, rows in panels_by_prefix(eval_dataset, self.eval_dataset, metric_key_prefix).items():
            if eval_dataset is not None:
                check_rows(self.setup.factory, prefix, rows)
            of_panel = {}
            for temperature in self.args.other_eval_temperatures:
                of_panel |= self._evaluate_at(temperature, rows, at_temperature(prefix, temperature))
            of_panel |= self._evaluate_at(self.args.eval_temperature, rows, prefix)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, of_panel)
            metrics |= of_panel
        return metrics

    def _evaluate_at(self, temperature: float, dataset: Dataset, prefix: str) -> dict[str, float]:
        training = self.model.training
        self.model.eval()
        set_optimizer_mode(self.optimizer, training=False)
        if self.accelerator.is_main_process and self.folder.take_for_evaluation():
            self._write_run()
        metrics = self.panels(dataset, prefix, temperature, self.state.global_step)
        # In training mode TRL would add the iteration's metrics, and forget them.
        self.log({name: value for name, value in metrics.items() if not math.isnan(value)})
        self.model.train(training)
        return metrics

    # -- checkpoints, output folder, Hub ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """Train the model. `output_dir` belongs to one run and is locked meanwhile; a second call continues the run.

        Args:
            resume_from_checkpoint: a folder, `True` or `"latest"` for the last checkpoint of `output_dir`, or `"auto"`
                for the last one if there is any.
            **kwargs: passed on to transformers' `train`.

        Raises:
            G2POError: when `output_dir` holds another run and `overwrite` is False, when another process trains
                there, and when the checkpoint belongs to another run or cannot be continued with these settings.
        """
        for name, value in self._made_with.items():
            remedy = f"the trainer was made with {value!r} and reads it once; make another trainer"
            require(getattr(self.args, name) == value, name, getattr(self.args, name), remedy)
        self.iteration.reset()
        self.update.guard.reset()
        self.tally.load_state_dict({})
        resumable = self.args.fields_with("resumable")
        begin = partial(self.folder.begin, resume_from_checkpoint, self.args.overwrite, self.describe(), resumable)
        try:
            return self._train(on_main(self.accelerator, begin), **kwargs)
        finally:
            self.folder.release()

    def _train(self, checkpoint: str | None, **kwargs) -> TrainOutput:
        is_main, args = self.is_world_process_zero(), self.args
        finished, step = None, 0
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            step = state.global_step
            finished = state if 0 < args.max_steps <= step else None  # transformers would make one more step
            restored = self.resumption.restore(Path(checkpoint), self.run_identity(), trains=finished is None)
            self.iteration.mini_batches = restored
            if is_main:
                print(f"Resuming from {checkpoint}", flush=True)
        if is_main:
            self.folder.take(checkpoint, step)
        if is_main and (finished is None or not self.folder.is_ours):
            last_iteration = self.iteration.number - 1 if self.iteration.is_complete else self.iteration.number
            self.folder.leave_behind(step, last_iteration)
            self._write_run()
        if finished is not None:
            remedy = f"{checkpoint!r} is the end of its run (step {step}). Use its model, or raise it"
            require(not self.is_partitioned, "max_steps", args.max_steps, remedy)
            self._load_from_checkpoint(checkpoint)
            self.weight_check.check(checkpoint)
            self.state = finished
            return TrainOutput(step, 0.0, {})
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            set_optimizer_mode(self.optimizer, training=False)

    def _get_train_sampler(self, dataset=None) -> Sampler:
        return TaskSampler(super()._get_train_sampler(dataset), epoch=lambda: int(self.state.epoch or 0))

    def run_identity(self) -> dict[str, Any]:
        """Return the settings that must be unchanged for a run to be continued."""
        return identity_of(self.describe(), self.args.fields_with("resumable"))

    @cached_property
    def tasks_hash(self) -> str:
        """Hash of the training tasks, independent of their order."""
        return tasks_hash(self.train_dataset)

    def _get_output_dir(self, trial) -> str:
        return self._staging.folder(super()._get_output_dir(trial))

    def _save_checkpoint(self, model, trial) -> None:
        run_dir, args = Path(self._get_output_dir(trial)), self.args
        with self._staging.checkpoint(run_dir, self.state, self.accelerator, args) as staged:
            super()._save_checkpoint(model, trial)
            to_come = [] if self.iteration.is_complete else self.iteration.mini_batches
            self.resumption.save(staged, self.run_identity(), to_come, args.should_save, self.folder.run_id)
        if args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / staged.name))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer. The files are written elsewhere and then moved, so that none is ever incomplete.

        Unlike transformers' method, it never pushes to the Hub, so a Hub failure cannot abort saving.
        """
        set_optimizer_mode(self.optimizer, training=False)  # what is saved is what evaluations play
        # Of others, one rank alone may save.
        wait = self.accelerator.wait_for_everyone if self.is_partitioned else lambda: None
        folder = Path(output_dir or self.args.output_dir)
        with (
            self._staging.model_files(folder, self.args.should_save, wait) as written,
            self.player.actor.saved_template(),
            only_active_adapter(self.accelerator.unwrap_model(self.model)),
        ):
            super().save_model(str(written), _internal_call=True)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Do nothing: `_log_rollout` counts the tokens."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights by the model's own conversion: transformers compares the names in files with the model's."""
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif is_peft_model(self.model):  # in its dtype: transformers makes QLoRA's bfloat16 float32
            options = {"is_trainable": True, "autocast_adapter_dtype": False}
            self.model.load_adapter(str(find_adapter(resume_from_checkpoint)), self.model.active_adapter, **options)
        else:
            load_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Load the best checkpoint; transformers finds an adapter only if it is called "default"."""
        set_optimizer_mode(self.optimizer, training=False)  # before: it would change the weights that are loaded
        best = self.state.best_model_checkpoint
        if self.is_partitioned or not Path(best).is_dir():  # a checkpoint that is gone: transformers warns
            super()._load_best_model()
        else:
            self._load_from_checkpoint(best)
        self.weight_check.check(best)

    def init_hf_repo(self, token: str | None = None, **kwargs: Any) -> None:
        with hub.repository_made(self.args.hub_model_id, self.args.output_dir):
            super().init_hf_repo(token, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # While it is open, the folder will have another name when it is uploaded.
        if not self._staging.is_open:
            if self.is_world_process_zero():
                hub.write_gitignore(self.args.output_dir)
            super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, commit_message="End of training", blocking=True, token=None, revision=None, **kwargs):
        """Save the model to `output_dir` and upload it with its card.

        Arguments are those of `Trainer.push_to_hub`; `private` is passed by name.

        Raises:
            HubError: if the upload fails; the model is in `output_dir`.
        """
        with hub.model_pushed(self, token, kwargs.get("private")):
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        """Write output_dir/README.md: model, tasks, success before and after, settings, versions."""
        if self.is_world_process_zero():
            tags = [*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])]
            with atomic_write(Path(self.args.output_dir, "README.md")) as file:
                file.write(str(card_of(self, tags, model_name, dataset_name)))

    def close(self) -> None:
        """End the environment workers. Called when the trainer is deleted; may be called earlier."""
        self.player.close()
