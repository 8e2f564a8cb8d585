"""`G2POTrainer`: TRL's `GRPOTrainer` with a multi-turn rollout and graph advantages.

Four things differ from GRPO:
1. a sample's "generation" is an episode in an environment, many replies long;
2. every step of it (one prompt, one reply) is a row of its own, so a rollout gives any number of rows;
3. a row's advantage comes from the state graph of its group, not from the reward alone;
4. rows are cut into micro-batches by tokens inside one training step.
The loss is TRL's own.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProcessorMixin, ProgressCallback, Trainer

from .config import G2POConfig
from .credit.estimators import estimator_name, make_estimator
from .credit.graph import StateGraph, TrajectoryRecord, record
from .credit.prediction import LambdaChoice
from .environments.contract import TextEnvironment
from .environments.tasks import check_datasets, groups_of
from .environments.tools import TOOL_PROMPT, is_tool_environment, text_environment_factory
from .rollout.chat_template import template_of
from .rollout.player import RolloutStats
from .rollout.prompting import DEFAULT_PROMPT, PromptTemplate
from .runs.callbacks import CollapseStop, IterationLine
from .runs.metrics import merge_micro_batch_metrics, rollout_metrics, without_texts
from .runs.sample_table import SampleTable
from .trajectory import Step, Trajectory, note_advantages, write_jsonl
from .update.batch import StepBatch, loss_scale, make_micro_batches
from .update.exchange import cut_over_ranks
from .update.log_probs import LogProbsTrainer
from .update.sharding import keep_outputs_exact

# TRL 1.16 asks a model for it at every rollout, under the name transformers 5 deprecates: nothing a user could act on.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def _environment_reward(**kwargs):
    """Satisfies `GRPOTrainer.__init__`, which wants a reward function; rewards come from the environment."""
    raise RuntimeError("rewards come from the environment; this function is never called")


class G2POTrainer(LogProbsTrainer):
    """Trains a language model as an agent by Group-Graph Policy Optimization.

    Args:
        model: a model id or path, or a model. With `beta` above 0 and no adapter, the reference model is loaded from
            where it came from.
        args: the configuration.
        train_dataset: one row a task; its columns are the keyword arguments of the environment's `reset`. A column
            `task_id` names the task in trajectories; `task_type` groups success rates.
        eval_dataset: the fixed panel, played once each (`num_generations_eval` times) by `evaluate`.
        environment_factory: makes a `TextEnvironment`: a class, a function or a `functools.partial`. It is called in
            worker processes, so it must be picklable. A class in TRL's own style (`reset`, tool methods, `get_reward`;
            no `step`) is taken as it is, see `g2po_trl.environments.tools`.
        prompt_template: the words around an observation, and the reply's parser.
        advantage_fn: `StateGraph -> array(num_steps)`, in place of `advantage_estimator` and its options.
        state_key: `Step -> str`, what tells states apart, in place of the environment's own key or the observation.
        processing_class: the tokenizer, with a chat template; of a multimodal checkpoint its processor.
        card_facts: more rows of the model card, e.g. the data's version.
        callbacks, optimizers, peft_config, quantization_config: as in `GRPOTrainer`.

    Raises:
        ValueError: a dataset without the columns `reset` needs, a tokenizer without a chat template, an output folder
            that cannot be written, an environment that breaks its contract on the first task.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "g2po"]
    _name = "G2PO"

    def __init__(
        self,
        model,
        args: G2POConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        environment_factory: Callable[[], TextEnvironment] | None = None,
        prompt_template: PromptTemplate = DEFAULT_PROMPT,
        advantage_fn: Callable[[StateGraph], np.ndarray] | None = None,
        state_key: Callable[[Step], str] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        card_facts: dict[str, str] | None = None,
        **kwargs,
    ):
        args = args or G2POConfig("g2po-output")
        if not isinstance(args, G2POConfig):
            raise TypeError(f"args is a {type(args).__name__}; G2POTrainer needs a G2POConfig")
        for name in ("reward_funcs", "reward_processing_classes", "tools", "rollout_func"):
            if name in kwargs:
                raise TypeError(f"{name} has no meaning in G2POTrainer: the environment plays and pays. Remove it.")
        if environment_factory is None:
            raise ValueError("environment_factory is None: pass the TextEnvironment class the agent acts in")
        if args.use_vllm and (kwargs.get("quantization_config") or getattr(model, "is_quantized", False)):
            raise ValueError(
                "use_vllm is True and the model is quantized to 4 or 8 bits: every weight sync would merge the "
                "adapter into rounded weights and round again. Use LoRA on bfloat16 weights, or use_vllm=False."
            )
        self.environment_factory = environment_factory
        if advantage_fn is not None:
            args.check_advantage_fn()
        if is_tool_environment(environment_factory):
            environment_factory = text_environment_factory(environment_factory, args.max_turns)
            prompt_template = TOOL_PROMPT if prompt_template is DEFAULT_PROMPT else prompt_template
        check_datasets(environment_factory, train_dataset, eval_dataset)
        _check_writable(Path(args.output_dir))

        super().__init__(
            model=model,
            reward_funcs=_environment_reward,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        if template_of(self.processing_class) is None:
            raise ValueError(
                f"the tokenizer of {self.model.config._name_or_path or 'the model'} has no chat template: use an "
                "instruction-tuned model, or set `tokenizer.chat_template` and pass it as `processing_class`"
            )
        if self.aux_loss_enabled:
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}: the auxiliary loss of mixture-of-experts "
                "models would depend on how the step batch is cut. Set router_aux_loss_coef=0."
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ValueError("fsdp_version is 1: generation needs FSDP2. Set fsdp_version: 2, see recipes/accelerate")
        loss_scale(args.loss_type, {"advantages": (), "completion_mask": torch.zeros(0)}, 1, 1, 1, 1)  # known type?
        self.card_facts = card_facts or {}
        self.choose_layout()
        self.advantage_fn, self.estimator_name = self._choose_estimator(advantage_fn)
        self.open_environments(environment_factory, prompt_template, state_key, dict(train_dataset[0]))
        self.evaluations = []
        self._slices: list[list[dict[str, Any]]] = []
        self._update_time = 0.0
        self.lambda_choice = LambdaChoice()
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        if not args.disable_tqdm:
            self.add_callback(IterationLine(args.optimizer_steps_per_iteration))
        self.sample_table = SampleTable(
            args.log_trajectories_every, args.num_trajectories_logged, self.callback_handler.callbacks
        )
        if args.log_trajectories_every:
            self.add_callback(self.sample_table)
        if args.min_valid_action_ratio or args.min_success_of_best:
            self.add_callback(
                CollapseStop(args.min_valid_action_ratio, args.min_success_of_best, args.collapse_patience)
            )

    def create_accelerator_and_postprocess(self) -> None:
        """The accelerator as transformers makes it; called before any model is prepared, the reference included."""
        super().create_accelerator_and_postprocess()
        keep_outputs_exact(getattr(self.accelerator.state, "fsdp_plugin", None))

    def _choose_estimator(self, advantage_fn: Callable | None) -> tuple[Callable | None, str]:
        """The estimator and its name."""
        if advantage_fn is None:
            return make_estimator(self.args), estimator_name(self.args)
        return advantage_fn, getattr(advantage_fn, "__name__", type(advantage_fn).__name__)

    def estimate_advantages(self, graph: StateGraph, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """(S,) advantages of all ranks' steps, by their graph; `trajectories` are this rank's."""
        return self.advantage_fn(graph)

    # -- rollout ---------------------------------------------------------------------------------------------------

    def _roll_out(self, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Rollout -> graph -> advantages -> step batch: the micro-batches of each of the iteration's slices."""
        num_generations, rank = self.args.num_generations, self.accelerator.process_index
        first = rank * len(rows)  # a group is `num_generations` rows in a row, counted over all ranks
        groups = [(first + i) // num_generations for i in range(len(rows))]
        trajectories, stats = self.play(rows, groups=groups)

        started = time.perf_counter()
        self._assign_state_keys(trajectories, groups)
        with_actions = self.args.value_lambda == "auto"
        records = gather_object([record(trajectory, with_actions) for trajectory in trajectories])
        self.task_errors.count(records)
        self._check_errors(trajectories, records)
        graph = self._graph_of(groups_of(records, num_generations))
        advantages = np.asarray(self.estimate_advantages(graph, trajectories), dtype=np.float64)
        steps_before = sum(len(r.keys) for r in records[:first])
        num_steps = sum(len(t.steps) for t in trajectories)
        _check_advantages(advantages, sum(len(r.keys) for r in records))
        advantage_time = time.perf_counter() - started

        own = advantages[steps_before : steps_before + num_steps]
        note_advantages(trajectories, own, groups)
        batch = StepBatch.from_trajectories(trajectories, own, self.args.mask_truncated_completions)
        started = time.perf_counter()
        slices, update_metrics = self._micro_batches(batch)
        batch_time, started = time.perf_counter() - started, time.perf_counter()
        self.add_log_probs([micro_batch for part in slices for micro_batch in part])
        logps_time = time.perf_counter() - started
        times = {"time/advantage": advantage_time, "time/batch": batch_time, "time/logps": logps_time}
        self._log_rollout(trajectories, stats, graph, times, update_metrics)
        return slices

    def _graph_of(self, groups: list[list[TrajectoryRecord]]) -> StateGraph:
        """The graph with the values that are asked for; the same on every rank."""
        args = self.args
        if args.value_lambda != "auto":
            return StateGraph.from_records(groups, args.gamma, args.value_lambda)
        value_lambda = self.lambda_choice.choose(StateGraph.from_records(groups, args.gamma))
        self._metrics["train"]["graph/value_lambda"].append(value_lambda)
        return StateGraph.from_records(groups, args.gamma, value_lambda)

    def _micro_batches(self, local: StepBatch) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
        """This rank's part of all ranks' step samples, as micro-batches by slice; and `update/*` metrics."""
        slices, metrics = self.cut(local)
        if not self.layout_holds(slices):
            slices, metrics = self.cut(local)
        return slices, metrics

    def cut(self, local: StepBatch) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
        """`make_micro_batches` of all ranks' step samples as configured; the same, however often they are cut."""
        args, rank = self.args, self.accelerator.process_index
        if self.accelerator.num_processes == 1:
            cut = partial(make_micro_batches, [local], rank)
        else:
            cut = partial(cut_over_ranks, local, rank, lambda thing: gather_object([thing]), self.accelerator.device)
        return cut(
            args.steps_per_generation,
            args.max_tokens_per_micro_batch,
            args.loss_type,
            self.encode.tokenizer.pad_token_id,
            self.row_multiple,
            np.random.default_rng([args.seed, self._step, 0]),  # the same on every rank
            self.token_layout,
            self.packed_row_tokens,
            self.beta != 0.0,
        )

    # -- training --------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs):
        """Micro-batches go to the device as they are: transformers casts floats to DeepSpeed's dtype."""
        if not isinstance(inputs, dict):
            raise TypeError("dataset rows cannot be prepared one batch at a time: use `evaluate` or `play`")
        return send_to_device(inputs, self.accelerator.device)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One slice of the rollout: forward and backward of its micro-batches. Rolls out first when it is time."""
        slices_per_rollout = self.args.steps_per_generation
        if self._step % (slices_per_rollout * self.num_iterations) == 0 or not self._slices:
            self._slices = self._roll_out(inputs)
        micro_batches = self._slices[self._step % slices_per_rollout]

        started = time.perf_counter()
        metrics = self._metrics["train"]
        marks = {name: len(values) for name, values in metrics.items()}
        loss = torch.zeros((), device=self.accelerator.device)
        ends_step = self.accelerator.sync_gradients
        # Only the last backward pass of an optimizer step exchanges gradients; DeepSpeed also steps there. FSDP
        # exchanges after each: a gradient that is not exchanged is kept whole, of all weights on every rank.
        if self.accelerator.is_fsdp2:  # transformers has switched it off, except in the last slice of a step
            model.set_requires_gradient_sync(True)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.accelerator.gradient_state._set_sync_gradients(ends_step and last)
            with nullcontext() if last or self.is_fsdp_enabled else self.accelerator.no_sync(model):
                loss += Trainer.training_step(self, model, micro_batch, num_items_in_batch)
        merge_micro_batch_metrics(metrics, marks, [m["weight"] for m in micro_batches])

        self._step += 1
        self._update_time += time.perf_counter() - started
        if self._step % (slices_per_rollout * self.num_iterations) == 0:
            metrics["time/update"].append(self._update_time)
            self._update_time = 0.0
            if not self.policy_moves_on:
                self.log_sampling()
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * inputs["loss_scale"]

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _log_rollout(
        self,
        trajectories: list[Trajectory],
        stats: RolloutStats,
        graph: StateGraph,
        times: dict[str, float],
        update_metrics: dict[str, float],
    ) -> None:
        args = self.args
        ranks = gather_object([([without_texts(trajectory) for trajectory in trajectories], stats, times)])
        everyone = [trajectory for played, _, _ in ranks for trajectory in played]
        stats = RolloutStats.over_ranks([rank_stats for _, rank_stats, _ in ranks])
        values = {
            **rollout_metrics(everyone, graph, args),
            **stats.metrics(len(everyone)),
            **{name: max(rank_times[name] for _, _, rank_times in ranks) for name in times},
            **update_metrics,
            "episode/tasks_set_aside": len(self.task_errors.set_aside),
        }
        for name, value in values.items():
            self._metrics["train"][name].append(float(value))
        self.state.num_input_tokens_seen += stats.prompt_tokens + stats.generated_tokens
        iteration = self._step // (args.steps_per_generation * self.num_iterations) + 1
        if args.log_trajectories_every:
            self.sample_table.offer(trajectories, iteration)
        if args.save_trajectories:
            suffix = f"-rank{self.accelerator.process_index}" if self.accelerator.num_processes > 1 else ""
            write_jsonl(Path(args.output_dir) / "trajectories" / f"train-{iteration:06d}{suffix}.jsonl", trajectories)

    # -- what outlives the process ---------------------------------------------------------------------------------

    def rollout_state(self) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
        """Place in the iteration, evaluations so far, and the step samples that are still to be trained on."""
        between_iterations = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        state = {"step": self._step, "update_time": self._update_time, "evaluations": self.evaluations}
        state["metrics"] = dict(self._metrics["train"])  # not logged yet
        state["task_errors"] = self.task_errors.in_a_row
        state["lambda_choice"] = self.lambda_choice.state()
        return state, [] if between_iterations else self._slices

    def restore_rollout_state(self, state: dict[str, Any], slices: list[list[dict[str, Any]]]) -> None:
        self._step, self._update_time, self.evaluations = state["step"], state["update_time"], state["evaluations"]
        for name, values in state["metrics"].items():  # JSON has no NaN
            self._metrics["train"][name] = [math.nan if value is None else value for value in values]
        self.task_errors.in_a_row.update(state.get("task_errors", {}))
        self.lambda_choice.restore(state["lambda_choice"])
        self._slices = slices
        if self.accelerator.is_main_process:
            self.write_evaluations()


def _check_advantages(advantages: np.ndarray, num_steps: int) -> None:
    if advantages.shape != (num_steps,):
        raise ValueError(
            f"advantage_fn returned shape {advantages.shape}; it must return one number a step: ({num_steps},)"
        )
    if not np.isfinite(advantages).all():
        raise ValueError(f"advantage_fn returned {int((~np.isfinite(advantages)).sum())} values that are not finite")


def _check_writable(output_dir: Path) -> None:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"output_dir is {str(output_dir)!r} and cannot be written ({error}): choose another"
        ) from error
