"""Rollouts played by the real loops, with what they wait for simulated (`simulated.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

from benchmarks.simulation.simulated import (
    Clock,
    EngineCosts,
    PoolCosts,
    Recorded,
    SimulatedEngine,
    SimulatedPool,
    SimulatedSession,
)
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.loop import Loop
from g2po_trl.rollout.player import Player
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.trajectory import Trajectory

Group = Sequence[Recorded]
LOOPS = ("turns", "streams")


@dataclass
class Rank:
    """A rank that plays one rollout after the other, as a run does.

    Args:
        loop: `"turns"`, `"streams"`, or `"rolling 1"` for groups that go on into the next rollout (partial rollouts).
    """

    engine_costs: EngineCosts
    pool_costs: PoolCosts
    max_turns: int
    loop: str

    def __post_init__(self):
        self.clock, self.version, self.rolling = Clock(), 0, None
        self.pool = SimulatedPool(self.clock, self.pool_costs)
        self.engine = SimulatedEngine(self.clock, self.engine_costs)

    @property
    def ahead(self) -> int:
        return 0 if self.loop in LOOPS else int(self.loop.split()[1])

    def play(self, groups: Sequence[Group], others: Sequence[Group] = ()) -> dict[str, float]:
        """A rollout, and what it took. `others`: groups that rolling groups begin with, beside those of a rollout.

        Raises:
            RuntimeError: if an episode was not played as it is recorded.
        """
        began, computed, worked = self.clock.now, self.engine.computing, self.pool.working
        play = self._roll if self.ahead else self._play
        episodes, steps = play(groups, others)
        for episode in episodes:
            self._check(episode)
        return {
            "seconds": self.clock.now - began,
            "computing": self.engine.computing - computed,
            "environments": self.pool.working - worked,
            "steps": steps,
            "episodes": len(episodes),
        }

    def _play(self, groups: Sequence[Group], others: Sequence[Group]) -> tuple[list[Trajectory], int]:
        episodes = [Episode("", number) for number in range(sum(map(len, groups)))]
        tasks = [{"episodes": group} for group in groups for _ in group]
        names = [object() for _ in groups]
        of_groups = [name for name, group in zip(names, groups) for _ in group]
        session, stats = SimulatedSession(self.engine, self.pool), RolloutStats()
        loop = Loop(self.pool, session, EpisodeLimits(self.max_turns), stats, together=self.loop == "turns")
        loop.play(episodes, tasks, of_groups)
        played = [episode.trajectory() for episode in episodes]
        if stats.num_steps != sum(len(trajectory.steps) for trajectory in played):
            raise RuntimeError("steps were lost")
        return played, stats.num_steps

    def _roll(self, groups: Sequence[Group], others: Sequence[Group]) -> tuple[list[Trajectory], int]:
        rows, beside = ([{"task_id": f"{id(group)}", "episodes": group} for group in of] for of in (groups, others))
        if self.rolling is None:
            from g2po_trl.experimental.partial_rollouts import PartialRollouts
            from g2po_trl.rollout.strategy import RolloutContext

            actor = SimpleNamespace(
                streams=True,
                is_collective=False,
                rollout=nullcontext,
                session=lambda *_: SimulatedSession(self.engine, self.pool),
            )
            player = Player(self.pool, actor, EpisodeLimits(self.max_turns))
            context = RolloutContext(player, len(groups[0]), beside)
            self.rolling = PartialRollouts(context, max_off_policy_steps=self.ahead)
        rows = [row for row in rows for _ in row["episodes"]]
        rollout = self.rolling.collect(rows, range(len(rows)), self.version)
        self.version += 1
        return rollout.trajectories, rollout.stats.num_steps

    def _check(self, played: Trajectory) -> None:
        recorded = self.pool.recorded.pop(played.final_observation, None)  # each once
        if recorded is None or (len(played.steps), played.outcome == "success") != (recorded.turns, recorded.ends):
            raise RuntimeError("the rollout is not the recorded one")


def all_at_once(groups: Sequence[Group], costs: EngineCosts) -> float:
    """Seconds of the engine for all prompts of a rollout, handed to it without turns or environments."""
    engine = SimulatedEngine(Clock(), costs)
    sizes = [size for group in groups for member in group for size in zip(member.prompts, member.completions)]
    for number, size in enumerate(sizes):
        engine.submit(number, *size)
    left = len(sizes)
    while left:
        left -= len(engine.advance())
    return engine.clock.now
