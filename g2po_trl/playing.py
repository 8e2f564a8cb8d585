"""A trainer that plays: the model in its engine, the environments in their pool, episodes of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import gather_object

from .credit.state_keys import assign_keys, keys_of_groups, make_state_key, merge_similar_keys
from .environments.contract import TextEnvironment
from .environments.pool import EnvironmentPool
from .environments.tasks import task_id_of
from .rollout.encoding import ChatEncoder
from .rollout.generation import make_engine
from .rollout.player import RolloutStats, run_episodes
from .rollout.prompting import PromptTemplate
from .rollout.sampling import Sampling
from .runs.callbacks import RolloutBar
from .runs.panel import PanelTrainer
from .runs.task_errors import TaskErrorReport, TaskErrors
from .trajectory import Step, Trajectory


class PlayingTrainer(PanelTrainer):
    """Plays episodes of tasks with the current policy. Knows nothing of graphs, advantages and updates."""

    def open_environments(
        self,
        environment_factory: Callable[[], TextEnvironment],
        prompt_template: PromptTemplate,
        state_key: Callable[[Step], str] | None,
        first_task: dict[str, Any],
    ) -> None:
        """Start the engine and the workers, and try the environment on a task before any work is lost."""
        args = self.args
        self.prompt_template = prompt_template
        self.state_key = make_state_key(state_key, args.state_key_ignores)
        self.encode = ChatEncoder(self.processing_class, args.chat_template_kwargs)
        self.encode(prompt_template.messages("observation", "task"))  # a template that refuses does so now
        self.engine = make_engine(self)
        self.pool = EnvironmentPool(
            environment_factory,
            num_workers=args.num_environment_workers,
            reset_timeout=args.environment_reset_timeout,
            step_timeout=args.environment_step_timeout,
            load_timeout=args.environment_load_timeout,
            episode_timeout=args.environment_episode_timeout,
            max_worker_resets=args.environment_worker_resets,
            max_worker_memory=(args.environment_worker_memory_mb or 0) * 2**20 or None,
            environment_variables=args.environment_variables or (),
        )
        self.pool.check(first_task)
        self.task_errors = TaskErrors(args.task_error_patience)
        self.add_callback(TaskErrorReport(self.task_errors))
        if self.accelerator.is_main_process and not args.disable_tqdm:
            withheld = ", ".join(self.pool.withheld)
            print(
                f"Environments: {self.pool.name} in {self.pool.num_workers} worker processes a rank, "
                f"{max(self.pool.memory()) / 2**20:.0f} MB each after one episode, "
                f"{args.per_device_train_batch_size * args.steps_per_generation} episodes at a time"
                + (f"; they do not get {withheld} (environment_variables)" if withheld else ""),
                flush=True,
            )

    def play(
        self,
        tasks: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        groups: Sequence[int] | None = None,
        description: str = "rollout",
        seeds: Sequence[int] | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each task with the current policy, on this rank; all ranks must call it together.

        Args:
            tasks: dataset rows. sampling: `None` is training's.
            seeds: one an episode, of its replies, where the engine takes any (vLLM). `None`: torch's random state.
        """
        args = self.args
        sampling = sampling or Sampling.for_training(args)
        groups = list(range(len(tasks))) if groups is None else groups
        task_ids = [task_id_of(task) for task in tasks]
        played = [i for i, task_id in enumerate(task_ids) if task_id not in self.task_errors]
        bar = RolloutBar(description, args.max_turns, len(played), self.accelerator.is_main_process)
        try:
            with self.policy_in_engine():
                trajectories, stats = run_episodes(
                    self.pool,
                    lambda prompts, seeds=None: self.engine.generate(prompts, sampling, seeds),
                    self.encode,
                    self.prompt_template,
                    [tasks[i] for i in played],
                    [task_ids[i] for i in played],
                    [groups[i] for i in played],
                    args.max_turns,
                    args.history_length,
                    args.max_prompt_length,
                    any_live=self._any_rank if self.engine.is_collective else bool,
                    on_turn=bar,
                    overlap=args.overlap_environments,
                    seeds=None if seeds is None else [seeds[i] for i in played],
                )
        finally:
            bar.close()
        of_task = dict(zip(played, trajectories))
        set_aside = "set aside: nothing but environment errors before"
        return [
            of_task[i] if i in of_task else Trajectory(task_id, [], 0.0, "error", error=set_aside)
            for i, task_id in enumerate(task_ids)
        ], stats

    def policy_in_engine(self) -> AbstractContextManager[None]:
        """Around several `play` calls of one policy: the engine gets its weights once."""
        if (self.is_fsdp_enabled or self.is_deepspeed_enabled) and not self.accelerator._models:
            raise RuntimeError(
                "the model is sharded when `train` begins and cannot play before: set eval_on_start=True instead of "
                "calling `evaluate` first"
            )
        return self.engine.rollout()

    def _any_rank(self, flag: bool) -> bool:
        return bool(self.accelerator.reduce(torch.tensor(int(flag), device=self.accelerator.device)).item())

    def _assign_state_keys(self, trajectories: list[Trajectory], groups: list[int]) -> None:
        if self.state_key is not None:
            assign_keys(trajectories, self.state_key)
        if self.args.state_similarity < 1:
            gathered = gather_object([keys_of_groups(trajectories, groups)])
            merge_similar_keys(trajectories, groups, self.args.state_similarity, gathered)

    def _check_errors(self, trajectories: list[Trajectory], records) -> None:
        not_begun = [r.failure_reason for r in records if r.counted and not r.keys]
        if len(not_begun) / len(records) > self.args.max_error_rate:
            raise RuntimeError(
                f"{len(not_begun) / len(records):.0%} of the trajectories ended before their first step, more than "
                f"max_error_rate={self.args.max_error_rate:.0%}, and nothing is learned from them. The first: "
                f"{not_begun[0]}"
            )
        rate = sum(r.outcome == "error" for r in records) / len(records)
        if rate > self.args.max_error_rate:
            reasons = gather_object([t.error for t in trajectories if t.outcome == "error"][:1])
            raise RuntimeError(
                f"{rate:.0%} of the trajectories ended in an environment error, more than max_error_rate="
                f"{self.args.max_error_rate:.0%}. Mend the environment (or raise max_error_rate). The first:\n"
                f"{reasons[0]}"
            )

    def close(self) -> None:
        """End the environment workers. Called by itself when the trainer goes; may be called before."""
        self.pool.close()
