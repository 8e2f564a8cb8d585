"""`Player`: a task goes in, a trajectory comes out. Training, panels, evaluation and notebooks play through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..environments.pool import EnvironmentPool
from ..environments.tasks import task_id_of
from ..trajectory import Trajectory
from .actor import Actor
from .episodes import Episode
from .sampling import Sampling
from .stats import RolloutStats
from .turns import Turns

SET_ASIDE = "set aside: nothing but environment errors before"


@dataclass
class Player:
    """Environments, and who acts in them.

    Args:
        pool: hosts the environments.
        actor: answers their observations: a `PromptActor`, or a prompted agent.
        max_turns: an episode that is not over by then was a failure, recorded as `"truncated"`.
        overlap: environments work while the other half of the episodes is asked for its actions.
        set_aside: names of tasks that are not played; their trajectories are errors at once.
        any_live: this process has live episodes -> any has. Asked where the actor's calls are collective: every rank
            must go on until all are done.
    """

    pool: EnvironmentPool
    actor: Actor
    max_turns: int = 30
    overlap: bool = False
    set_aside: Container[str] = ()
    any_live: Callable[[bool], bool] = bool

    def play(
        self,
        tasks: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        groups: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        on_turn: Callable[[int, int], None] | None = None,
        on_end: Callable[[Episode], None] | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Play one episode of each task, all at once.

        Args:
            tasks: keyword arguments of `reset`, one dict an episode.
            sampling: how replies are drawn and where they end.
            groups: numbers; members of a group share workers where that is as fast. `None`: each is on its own.
            seeds: one an episode, of its replies, where the engine takes any. `None`: torch's random state.
            on_turn: called after each turn with (turn, live episodes).
            on_end: called once with each episode, as soon as it is over.

        Returns:
            One trajectory a task, in order, and what they cost. Environment failures are data: such a trajectory has
            outcome `"error"` or `"lost"`.
        """
        stats = RolloutStats()
        groups = range(len(tasks)) if groups is None else groups
        names = [task_id_of(task) for task in tasks]
        played = [place for place, name in enumerate(names) if name not in self.set_aside]
        episodes = [Episode(names[place], number) for number, place in enumerate(played)]
        seeds = None if seeds is None else [seeds[place] for place in played]
        with self.rollout():
            started = time.perf_counter()
            session = self.actor.session(sampling or Sampling(), seeds, stats)
            any_live = self.any_live if self.actor.is_collective else bool
            turns = Turns(self.pool, session, self.max_turns, stats, self.overlap, any_live, on_turn, on_end)
            turns.play(episodes, [tasks[place] for place in played], [groups[place] for place in played])
            stats.total_time = time.perf_counter() - started
        trajectories = [Trajectory(name, [], 0.0, "error", error=SET_ASIDE) for name in names]
        for place, episode in zip(played, episodes):
            trajectories[place] = episode.trajectory()
        return trajectories, stats

    def rollout(self) -> AbstractContextManager[None]:
        """Around several `play` calls of one policy: its engine gets its weights once."""
        return self.actor.rollout()
