"""The loop that plays episodes: observations go to a session, the session's actions to the environments.

A *session* chooses the actions of a rollout's episodes, e.g. a `PromptSession` of the model that is trained.

    begin      reset an environment for each episode, in a slot of the pool
    observe    receive answers of environments: an episode has ended, or is ready for the session
    ask        ask the session for the next steps of the ready episodes
    act        receive steps from the session and send their actions to the environments; then `observe` again

By default a loop streams: it asks for an episode's next step as soon as its observation has arrived. With `together`
it plays turns, in which all episodes wait for each other: for engines that answer a whole batch, and for ranks that
must generate together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.pool import EnvironmentPool
from ..trajectory import Step
from .episode import Episode, sent
from .stats import RolloutStats

# Longest wait for the session: while environments may answer as well, and while none is busy.
POLL_SECONDS, IDLE_POLL_SECONDS = 0.005, 1.0


class Session(Protocol):
    """Chooses the actions of one rollout. `waiting` is the number of episodes that wait for their next step."""

    waiting: int

    def ask(self, episodes: Sequence[Episode]) -> None:
        """Request the next steps of episodes. May end some of them, by `Episode.give_up`."""

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        """Return the requested steps that are ready; `None` for an episode that the session has ended.

        A session that streams waits at most `timeout` seconds for the first step. Other sessions return all requested
        steps; those of a collective actor are called equally often on every rank, even if nothing is requested.
        """


@dataclass
class Loop:
    """Plays episodes to their ends.

    Args:
        pool: hosts the environments.
        session: chooses the actions.
        limits: limits of an episode.
        stats: costs are added to it. `environment_time` is the time in which only environments were busy.
        together: play turns: wait for all environments before asking the session, and for all of its steps before
            sending actions.
        any_running: whether this rank has running episodes -> whether any rank has. Ranks that generate together call
            it once a turn and continue until no rank has any. Default: for one rank.
        on_turn: called with (turns of the longest episode, number of running episodes) when one of these has changed.
        on_end: called with each episode that has ended.

    `running` has the running episodes, by their slots in the pool.
    """

    pool: EnvironmentPool
    session: Session
    limits: EpisodeLimits
    stats: RolloutStats
    together: bool = False
    any_running: Callable[[bool], bool] = bool
    on_turn: Callable[[int, int], None] | None = None
    on_end: Callable[[Episode], None] | None = None
    running: dict[int, Episode] = field(default_factory=dict, init=False)
    _slots: dict[int, int] = field(default_factory=dict, init=False)  # by the episode's number
    _ready: list[Episode] = field(default_factory=list, init=False)  # to ask the session about

    def play(self, episodes: Sequence[Episode], tasks: Sequence[dict[str, Any]], groups: Sequence[Any]) -> None:
        """Play episodes to their ends, given the arguments of `reset` and the group of each, see `EnvironmentPool`."""
        try:
            if episodes:
                self.begin(episodes, tasks, groups)
            progress = 0, len(self.running)
            while True:
                self.observe()
                self.ask()
                before, progress = progress, (self.stats.turns, len(self.running))
                if self.on_turn and progress != before:
                    self.on_turn(*progress)
                if not self.any_running(bool(self.running)):
                    break
                self.act()
        finally:
            self.pool.end(self.running)

    def begin(self, episodes: Sequence[Episode], tasks: Sequence[dict[str, Any]], groups: Sequence[Any]) -> None:
        """Reset an environment for each episode."""
        clock = time.perf_counter()
        slots = self.pool.begin(tasks, groups)
        self.running = dict(zip(slots, episodes))
        self._slots = {episode.number: slot for slot, episode in self.running.items()}
        self.stats.environment_time += time.perf_counter() - clock

    def observe(self) -> None:
        """Receive answers of environments. Wait for them if the session is idle and no episode is ready."""
        clock, idle = time.perf_counter(), not self.session.waiting
        if self.together:
            self._take_all()
        else:
            self._end(self._take(timeout=None if idle and not self._ready else 0.0))
        if idle:
            self.stats.environment_time += time.perf_counter() - clock

    def ask(self) -> None:
        """Give the session the ready episodes, in the order of their numbers."""
        asked, self._ready = sorted(self._ready, key=lambda episode: episode.number), []
        if asked:
            self.session.ask(asked)
        self._end([episode for episode in asked if not self._continues(episode)])

    def act(self) -> None:
        """Receive steps and send their actions. Wait for steps, but only briefly if environments may answer."""
        environments_busy = len(self.running) > self.session.waiting
        steps = self.session.receive_steps(POLL_SECONDS if environments_busy else IDLE_POLL_SECONDS)
        while self.together and self.session.waiting:
            steps += self.session.receive_steps(IDLE_POLL_SECONDS)
        self._send(steps)

    def _take(self, timeout: float | None) -> list[Episode]:
        """Receive answers, note the episodes that are ready, and return the episodes that have ended."""
        answers = self.pool.receive(timeout)
        if timeout is None and self.running and not answers:  # none is pending: this would loop forever
            raise RuntimeError(
                "the running episodes of this pool were ended from outside: while a trainer uses it, call Player.play "
                "instead of EnvironmentPool.reset or end()"
            )
        ended = []
        for slot, answer in answers.items():
            episode = self.running[slot]
            if episode.observation is None:
                episode.open(answer)
            else:
                episode.advance(answer)
                self._check_limits(episode, slot)
            if self._continues(episode):
                self._ready.append(episode)
            else:
                ended.append(episode)
        return ended

    def _take_all(self) -> None:
        ended = []
        while len(self._ready) + len(ended) < len(self.running):
            ended += self._take(timeout=None)
        self._end(sorted(ended, key=lambda episode: episode.number))

    def _send(self, steps: Sequence[tuple[Episode, Step | None]]) -> None:
        actions, ended = {}, []
        for episode, step in steps:
            if step is None:
                ended.append(episode)
                continue
            episode.steps.append(step)
            actions[self._slots[episode.number]] = sent(step)
            self.stats.turns = max(self.stats.turns, len(episode.steps))
        self.stats.num_steps += len(actions)
        self.pool.send(actions)
        self._end(ended)

    def _check_limits(self, episode: Episode, slot: int) -> None:
        """End a running episode that has exceeded a limit."""
        if episode.outcome is not None:
            return
        episode.seconds = self.pool.seconds(slot)
        if (reason := self.limits.by(episode.environment).exceeded(episode)) is not None:
            episode.give_up(reason)

    def _continues(self, episode: Episode) -> bool:
        return episode.outcome is None and episode.turns < self.limits.by(episode.environment).max_turns

    def _end(self, episodes: Sequence[Episode]) -> None:
        """Free the slots of episodes that have ended or run out of turns; tools are asked for their reward before."""
        asked = [(one, one.info.pop("pays_at_end", None)) for one in episodes]
        unpaid = {one.number: pay for one, pay in asked if pay and (one.failure_reason or one.outcome is None)}
        self.pool.send({self._slots[number]: pay for number, pay in unpaid.items()})
        episodes = [episode for episode in episodes if episode.number not in unpaid]
        slots = [self._slots.pop(episode.number) for episode in episodes]
        self.pool.end(slots)
        for slot, episode in zip(slots, episodes):
            del self.running[slot]
            if self.on_end:
                self.on_end(episode)
