"""`Player` plays tasks and returns trajectories. Training, panels, evaluation and notebooks use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..engines.sampling import Sampling
from ..environments.pool.pool import EnvironmentPool
from ..environments.tasks import task_id_of
from ..experimental.branching.branching import Branching, DeferredEpisodes
from ..trajectory import Trajectory
from .actor import Actor
from .episode import Branch, Episode
from .loop import Loop
from .replay import return_to_start
from .stats import RolloutStats

SET_ASIDE = "set aside: nothing but environment errors before"


@dataclass
class Player:
    """Plays tasks: environments, and an actor that answers their observations.

    Args:
        pool: hosts the environments.
        actor: chooses the actions: a `PromptActor`, or a prompted agent.
        max_turns: an episode still running after this many turns is a failure, with outcome `"truncated"`.
        streams: each episode is asked for its next action as soon as its observation is there, where the actor can
            answer so. Otherwise, and with `False`, all running episodes are asked together, once a turn.
        set_aside: ids of tasks that are not played; their trajectories have outcome `"error"`.
        any_live: for sharded models, whose ranks must generate together: whether this rank has running episodes ->
            whether any rank has.
        before_play: called before `play`, when others use the pool as well and must come to rest.
    """

    pool: EnvironmentPool
    actor: Actor
    max_turns: int = 30
    streams: bool = True
    set_aside: Container[str] = ()
    any_live: Callable[[bool], bool] = bool
    before_play: Callable[[], None] | None = None

    def play(
        self,
        tasks: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        groups: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        on_turn: Callable[[int, int], None] | None = None,
        on_end: Callable[[Episode], None] | None = None,
        branches: Sequence[Branch | None] | None = None,
        branching: Branching | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each task, all concurrently.

        Args:
            tasks: keyword arguments of `reset`, one dictionary per episode.
            sampling: how completions are sampled. Default: `Sampling()`.
            groups: group of each episode. Members may share workers. `None`: no groups.
            seeds: seed of each episode's completions, for engines that support seeds (vLLM). `None`: torch's random
                state.
            on_turn: called with the turns of the longest episode and the number of running episodes, when one of them
                has changed.
            on_end: called once with each episode, as soon as it has ended.
            branches: where each episode begins, if it continues another. `None`: all begin with their task.
            branching: holds back some episodes of each group, which are `group_size` tasks in a row, and decides where
                they begin: when the first ones of their group have ended, or of all groups, where nothing streams.

        Returns:
            One trajectory per task, in order, and the rollout's statistics. Failures of environments do not raise:
            such a trajectory has outcome `"error"` or `"lost"`.
        """
        if self.before_play:
            self.before_play()
        stats, streams = RolloutStats(), self.streams and self.actor.streams
        if branching is not None and not streams:
            return self._play_in_two_parts(branching, tasks, sampling, groups, seeds, on_turn, on_end)
        groups = range(len(tasks)) if groups is None else groups
        new = {group: object() for group in groups}  # to the pool they are other groups than the last rollout's
        names = [task_id_of(task) for task in tasks]
        played = [place for place, name in enumerate(names) if name not in self.set_aside]
        begin = branches or [None] * len(tasks)
        episodes = [Episode(names[place], number, branch=begin[place]) for number, place in enumerate(played)]
        if streams and seeds is None:  # which reply comes first must not decide what it says
            seeds = torch.randint(2**62, (len(tasks),)).tolist()
        seeds = None if seeds is None else [seeds[place] for place in played]
        first, more = episodes, tuple
        if branching is not None:
            held_back = DeferredEpisodes(branching, episodes, on_end)
            first, more, on_end = held_back.take(), held_back.take, held_back.ended
        with self.rollout():
            started = time.perf_counter()
            loop = Loop(
                self.pool,
                self.actor.session(sampling or Sampling(), seeds, stats),
                self.max_turns,
                stats,
                together=not streams,
                any_live=self.any_live if self.actor.is_collective else bool,
                prelude=return_to_start,
                on_turn=on_turn,
                on_end=on_end,
            )
            loop.play(first, [tasks[place] for place in played], [new[groups[place]] for place in played], more)
            stats.total_time = time.perf_counter() - started
            stats.parts = ((stats.turns, len(episodes)),)
        trajectories = [Trajectory(name, [], 0.0, "error", error=SET_ASIDE) for name in names]
        for place, episode in zip(played, episodes):
            trajectories[place] = episode.trajectory()
        return trajectories, stats

    def _play_in_two_parts(
        self, branching: Branching, tasks: Sequence[dict[str, Any]], sampling, groups, seeds, on_turn, on_end
    ) -> tuple[list[Trajectory], RolloutStats]:
        def play(places: Sequence[int], branches: Sequence[Branch | None]) -> tuple[list[Trajectory], RolloutStats]:
            own_groups, own_seeds = (None if of is None else [of[i] for i in places] for of in (groups, seeds))
            own = [tasks[i] for i in places]
            return self.play(own, sampling, own_groups, own_seeds, on_turn, on_end, branches)

        return branching.play(play, len(tasks))

    def rollout(self) -> AbstractContextManager[None]:
        """A context for several `play` calls with the same weights: the engine is given the weights once."""
        return self.actor.rollout()

    def close(self) -> None:
        """End the environment workers, and free what the engine holds."""
        self.pool.close()
        self.actor.close()
