"""`Player` plays tasks and returns trajectories. Training, evaluation and notebooks use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..engines.sampling import Sampling
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.several import COLUMN
from ..environments.tasks import task_id_of
from ..trajectory import Trajectory, stored_row
from ..utils.options import require
from .actor import Actor
from .episode import Episode
from .loop import Loop
from .stats import RolloutStats

EXCLUDED = "excluded: only environment errors before"


@dataclass
class Player:
    """Plays tasks: environments, and an actor that answers their observations.

    Args:
        pool: runs the environments.
        actor: chooses the actions: a `PromptActor`, or a prompted agent.
        limits: limits of an episode. One that reaches `max_turns` is a failure with outcome `"truncated"`.
        streams: ask for an episode's next action as soon as its observation is there, if the actor supports it.
            `False`: ask for the actions of all running episodes together, once per turn.
        excluded: ids of tasks that are not played; their trajectories have outcome `"error"`.
        any_running: whether this rank has running episodes -> whether any rank has. For sharded models, whose ranks
            must generate together.
    """

    pool: EnvironmentPool
    actor: Actor
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    streams: bool = True
    excluded: Container[str] = ()
    any_running: Callable[[bool], bool] = bool

    @classmethod
    def of(cls, args: Any, environment_factory: Callable, actor: Actor, **options: Any) -> Player:
        """Return the player with the limits among the attributes of `args`, and start its workers."""
        return cls(EnvironmentPool(environment_factory, PoolLimits.of(args)), actor, EpisodeLimits.of(args), **options)

    def play(
        self,
        tasks: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        groups: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        on_turn: Callable[[int, int], None] | None = None,
        on_end: Callable[[Episode], None] | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each task, all concurrently.

        Args:
            tasks: keyword arguments of `reset`, one dictionary per episode.
            sampling: how completions are sampled. Default: `Sampling()`.
            groups: group of each episode. Members may share workers. `None`: no groups.
            seeds: seed of each episode's completions, for engines that support seeds (vLLM). `None`: torch's random
                state.
            on_turn: see `Loop`.
            on_end: see `Loop`.

        Returns:
            One trajectory per task, in order, and the rollout's statistics. Failures of environments do not raise:
            such a trajectory has outcome `"error"` or `"lost"`.

        Raises:
            G2POError: if the number of groups or seeds differs from that of the tasks.
        """
        stats, streams = RolloutStats(), self.streams and self.actor.streams
        groups = range(len(tasks)) if groups is None else groups
        for name, values in (("groups", groups), ("seeds", seeds)):
            fits = values is None or len(values) == len(tasks)
            require(fits, name, values, f"pass one for each of the {len(tasks)} tasks")
        new = {group: object() for group in groups}  # groups of the pool, distinct from an earlier rollout's
        names = [task_id_of(task) for task in tasks]
        played = [index for index, name in enumerate(names) if name not in self.excluded]
        episodes = [self.episode(tasks[index], number) for number, index in enumerate(played)]
        if streams and seeds is None:  # completions must not depend on the order in which they come
            import torch  # not above: strategies are checked before torch is imported

            seeds = torch.randint(2**62, (len(tasks),)).tolist()
        seeds = None if seeds is None else [seeds[index] for index in played]

        with self.rollout():
            started = time.perf_counter()
            loop = Loop(
                self.pool,
                self.actor.session(sampling or Sampling(), seeds, stats),
                self.limits,
                stats,
                together=not streams,
                any_running=self.any_running if self.actor.is_collective else bool,
                on_turn=on_turn,
                on_end=on_end,
            )
            loop.play(episodes, [tasks[index] for index in played], [new[groups[index]] for index in played])
            stats.total_time = time.perf_counter() - started
            stats.parts = ((stats.turns, len(episodes)),)
        trajectories = [
            Trajectory(name, [], 0.0, "error", error=EXCLUDED, row=stored_row(task))
            for name, task in zip(names, tasks)
        ]
        for index, episode in zip(played, episodes):
            trajectories[index] = episode.trajectory()
        return trajectories, stats

    def episode(self, task: dict[str, Any], number: int) -> Episode:
        """Return a new episode of a task, with the name of its environment in a run with several."""
        environment = task.get(COLUMN) if self.pool.environment_names else None
        return Episode(task_id_of(task), number, environment=environment, row=task)

    @property
    def max_turns(self) -> int:
        """Maximum number of turns of an episode, over all environments."""
        return self.limits.most_turns

    def rollout(self) -> AbstractContextManager[None]:
        """Return a context for several `play` calls with the same weights, which are sent to the engine once."""
        return self.actor.rollout()

    def close(self) -> None:
        """End the environment workers and free the engine."""
        self.pool.close()
        self.actor.close()
