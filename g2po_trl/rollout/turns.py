"""Turn after turn: what is live is asked for an action, the pool plays it. Who answers is not known here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..environments.pool import EnvironmentPool
from ..trajectory import Step
from .episodes import Episode
from .returning import bring_back
from .stats import RolloutStats


class Session(Protocol):
    """Who answers, during one rollout."""

    def prepare(self, live: list[Episode]) -> None:
        """Called before `act`, as soon as observations are there; may end some episodes by `Episode.give_up`."""

    def act(self, live: list[Episode]) -> list[Step | None]:
        """The next step of each; `None` for one that it has ended by `Episode.fail` or `Episode.give_up`."""


@dataclass
class Turns:
    """Plays episodes to their ends, all at once.

    Args:
        session: answers observations.
        any_live: this process has live episodes -> any has: when `act` must be called on all of them together.
        on_turn: called after each turn with (turn, live episodes).
        on_end: called once with each episode, as soon as it is over.
        overlap: play in two halves: while `session` is asked about one, the environments of the other are at work and
            it is prepared, in a thread of their own.
        stats: what it cost is added to them.
    """

    pool: EnvironmentPool
    session: Session
    max_turns: int
    stats: RolloutStats
    overlap: bool = False
    any_live: Callable[[bool], bool] = bool
    on_turn: Callable[[int, int], None] | None = None
    on_end: Callable[[Episode], None] | None = None
    _slots: list[int] = field(default_factory=list, init=False)  # by the episode's number
    _told: set[int] = field(default_factory=set, init=False)
    _stepping: dict[int, Future[float]] = field(default_factory=dict, init=False)

    def play(self, episodes: Sequence[Episode], tasks: Sequence[dict[str, Any]], groups: Sequence[int]) -> None:
        """Play each episode, whose `number` is its place, on its task. All of them are over when it returns."""
        clock = time.perf_counter()
        self._slots = self.pool.begin(tasks, groups, family=object())
        try:
            for episode, seen in zip(episodes, self.pool.take(self._slots).values()):
                episode.open(seen)
            branches = {self._slots[e.number]: e for e in episodes if e.branch is not None}
            self.stats.replayed_steps += bring_back(self.pool, branches)
            self.stats.environment_time += time.perf_counter() - clock
            self._play(episodes)
        finally:
            self.pool.end(self._slots)

    def _play(self, episodes: Sequence[Episode]) -> None:
        self._prepare(episodes)
        parts = [episodes[::2], episodes[1::2]] if self.overlap else [episodes]
        with ThreadPoolExecutor(1) if self.overlap else nullcontext() as thread:
            while self.stats.turns < self.max_turns:
                acted = [self._turn(part, members, episodes, thread) for part, members in enumerate(parts)]
                if not any(acted):
                    break
                self.stats.turns += 1
                if self.on_turn:
                    self.on_turn(self.stats.turns, sum(episode.outcome is None for episode in episodes))
            for part, members in enumerate(parts):
                self._wait(part, members)
        self._tell_ended(episodes, all_of_them=True)

    def _turn(
        self, part: int, members: Sequence[Episode], episodes: Sequence[Episode], thread: ThreadPoolExecutor | None
    ) -> bool:
        """One turn of a half, once its environments have answered. False: no live episode, here or elsewhere."""
        self._wait(part, members)
        live = [episode for episode in members if self._goes_on(episode)]
        if not self.any_live(bool(live)):
            return False
        actions = {}
        for episode, step in zip(live, self.session.act(live)):
            if step is not None:
                episode.steps.append(step)
                actions[episode.number] = step.action
        self.stats.live_steps += len(actions)
        asked_again = members if self.stats.turns + 1 < self.max_turns else []
        if actions and thread is not None:
            self._stepping[part] = thread.submit(self._step, actions, episodes, asked_again)
        elif actions:
            self.stats.environment_time += self._step(actions, episodes, asked_again)
        return True

    def _step(self, actions: dict[int, str], episodes: Sequence[Episode], asked_again: Sequence[Episode]) -> float:
        """What the environments answer; seconds it took. Then prepare those that there is another turn for."""
        clock = time.perf_counter()
        results = self.pool.step({self._slots[number]: action for number, action in actions.items()})
        for number, result in zip(actions, results.values()):
            episodes[number].advance(result)
        seconds = time.perf_counter() - clock
        self._prepare(asked_again)
        return seconds

    def _wait(self, part: int, members: Sequence[Episode]) -> None:
        clock = time.perf_counter()
        if part in self._stepping:
            self._stepping.pop(part).result()
        self.stats.environment_time += time.perf_counter() - clock
        self._tell_ended(members)

    def _prepare(self, members: Sequence[Episode]) -> None:
        live = [episode for episode in members if self._goes_on(episode)]
        if live:
            self.session.prepare(live)

    def _goes_on(self, episode: Episode) -> bool:
        return episode.outcome is None and episode.turns < self.max_turns

    def _tell_ended(self, members: Sequence[Episode], all_of_them: bool = False) -> None:
        for episode in members:
            if episode.number not in self._told and (all_of_them or episode.outcome is not None):
                self._told.add(episode.number)
                if self.on_end:
                    self.on_end(episode)
