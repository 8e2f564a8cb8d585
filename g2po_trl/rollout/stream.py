"""Episodes without turns: each is asked for its next action as soon as its observation is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..environments.pool import EnvironmentPool
from ..trajectory import Step
from .episodes import Episode
from .stats import RolloutStats

A_MOMENT = 0.005  # seconds to wait for the engine while environments may answer
A_WHILE = 1.0  # and while none will


class StreamingSession(Protocol):
    """Who answers, during one rollout, one by one. `waiting`: how many episodes it has not answered."""

    waiting: int

    def ask(self, episodes: Sequence[Episode]) -> None:
        """These have an observation to answer; may end some by `Episode.give_up`."""

    def answers(self, timeout: float) -> list[tuple[Episode, Step]]:
        """The next steps that are there, of whichever episodes. Waits for the first at most `timeout` seconds."""


@dataclass
class Stream:
    """Plays episodes to their ends; none waits for another.

    Args:
        session: answers observations.
        on_turn: called with (turns of the longest episode, live episodes) whenever one of the two has changed.
        on_end: called once with each episode, as soon as it is over.
        stats: what it cost is added to them. `environment_time` is that in which there was nothing else to do.
    """

    pool: EnvironmentPool
    session: StreamingSession
    max_turns: int
    stats: RolloutStats
    on_turn: Callable[[int, int], None] | None = None
    on_end: Callable[[Episode], None] | None = None

    def play(self, episodes: Sequence[Episode], tasks: Sequence[dict[str, Any]], groups: Sequence[int]) -> None:
        """Play each episode, whose `number` is its place, on its task. All of them are over when it returns."""
        self.pool.end()
        try:
            self._play(dict(zip(self.pool.begin(tasks, groups), episodes)))
        finally:
            self.pool.end()

    def _play(self, live: dict[int, Episode]) -> None:
        slots = {episode.number: slot for slot, episode in live.items()}
        stepping = len(live)
        while stepping or self.session.waiting:
            before = self.stats.turns, len(live)
            seen = self._observations()
            stepping -= len(seen)
            for slot, answer in seen.items():
                live[slot].take(answer)
            self.session.ask([live[slot] for slot in seen if self._goes_on(live[slot])])
            for slot in seen:
                if not self._goes_on(live[slot]):
                    ended = live.pop(slot)
                    if self.on_end:
                        self.on_end(ended)
            actions = self._actions(A_MOMENT if stepping else A_WHILE)
            self.pool.send({slots[number]: action for number, action in actions.items()})
            stepping += len(actions)
            if self.on_turn and before != (self.stats.turns, len(live)):
                self.on_turn(self.stats.turns, len(live))

    def _goes_on(self, episode: Episode) -> bool:
        return episode.outcome is None and len(episode.steps) < self.max_turns

    def _observations(self) -> dict[int, Any]:
        clock = time.perf_counter()
        seen = self.pool.receive(timeout=0.0 if self.session.waiting else None)
        if not self.session.waiting:
            self.stats.environment_time += time.perf_counter() - clock
        return seen

    def _actions(self, timeout: float) -> dict[int, str]:
        actions = {}
        for episode, step in self.session.answers(timeout) if self.session.waiting else ():
            episode.steps.append(step)
            actions[episode.number] = step.action
            self.stats.turns = max(self.stats.turns, len(episode.steps))
        self.stats.live_steps += len(actions)
        return actions
