"""The loop that plays episodes, between their environments and the model.

    begin      reset an environment, in a slot of the pool
    observe    receive the environments' answers: an episode is ready for the session, or has ended
    ask        give the session the ready episodes
    act        append the session's steps and send their actions to the environments; then `observe` again

A loop streams: each episode is asked as soon as its own observation has arrived. Or it plays turns, all episodes
`together`, for engines that answer a batch at a time, and for ranks that must generate together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..environments.contract import Observation, StepResult
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..trajectory import Step
from .episode import Episode
from .stats import RolloutStats

Answer = Observation | StepResult | EnvironmentFailure

# Longest wait for the session: while environments may answer as well, and while none is busy.
POLL_SECONDS, IDLE_POLL_SECONDS = 0.005, 1.0
_GONE = (
    "the running episodes of this pool were ended from outside: while a trainer uses it, call Player.play instead of "
    "EnvironmentPool.reset, check or end()"
)


class Session(Protocol):
    """Answers observations during one rollout. `waiting` is the number of episodes asked and not answered."""

    waiting: int

    def ask(self, episodes: Sequence[Episode]) -> None:
        """Ask for the next steps of episodes. May end some, by `Episode.give_up`."""

    def answers(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        """Return the next steps of some of the episodes asked; `None` for an episode that the session has ended.

        A session that streams waits at most `timeout` seconds for the first one. Another one answers all at once; if
        it is collective, every rank calls this equally often, even with nothing asked.
        """


@dataclass
class Loop:
    """Plays episodes to their ends.

    Args:
        pool: hosts the environments.
        session: answers observations.
        max_turns: an episode ends after this many turns.
        stats: costs are added to it. `environment_time` is the time in which only environments were busy.
        together: play turns: wait for all environments before asking the session, and for all of its answers before
            sending actions.
        any_running: whether this rank has running episodes -> whether any rank has. Ranks that generate together call
            it once a turn and continue until no rank has any. Default: for one rank.
        prelude: receives each environment's answers until its episode can be asked, and returns the action to send
            in between, or `None`. Default: the first observation begins the episode.
        on_turn: called with (turns of the longest episode, running episodes) when one of them has changed.
        on_end: called with each episode that has ended.
        policy_version: written into each step.

    `running` has the running episodes, by the pool's slots.
    """

    pool: EnvironmentPool
    session: Session
    max_turns: int
    stats: RolloutStats
    together: bool = False
    any_running: Callable[[bool], bool] = bool
    prelude: Callable[[Episode, Answer], str | None] = Episode.open
    on_turn: Callable[[int, int], None] | None = None
    on_end: Callable[[Episode], None] | None = None
    policy_version: int | None = None
    running: dict[int, Episode] = field(default_factory=dict, init=False)
    _slots: dict[int, int] = field(default_factory=dict, init=False)  # by the episode's number
    _opening: set[int] = field(default_factory=set, init=False)  # slots whose answers the prelude takes
    _ready: list[Episode] = field(default_factory=list, init=False)

    def play(
        self,
        episodes: Sequence[Episode],
        tasks: Sequence[dict[str, Any]],
        groups: Sequence[Any],
        more: Callable[[], Sequence[Episode]] = tuple,
    ) -> None:
        """Play episodes to their ends.

        Args:
            episodes: the episodes that begin at once.
            tasks: arguments of `reset`, by the number of an episode.
            groups: group of each task, see `EnvironmentPool.begin`.
            more: returns further episodes that may begin by now, each once. Default: none.
        """
        retry_group = object()

        def begin(new: Sequence[Episode]) -> None:
            if new:
                self.begin(new, [tasks[e.number] for e in new], [groups[e.number] for e in new], retry_group)

        try:
            begin(episodes)
            progress = 0, len(self.running)
            while True:
                self.observe()
                self.ask()
                begin(more())
                before, progress = progress, (self.stats.turns, len(self.running))
                if self.on_turn and progress != before:
                    self.on_turn(*progress)
                if not self.any_running(bool(self.running)):
                    break
                self.act()
        finally:
            self.pool.end(self.running)

    def begin(
        self,
        episodes: Sequence[Episode],
        tasks: Sequence[dict[str, Any]],
        groups: Sequence[Any],
        retry_group: object = None,
    ) -> None:
        """Reset an environment for each episode, while others are running; see `EnvironmentPool.begin`."""
        clock = time.perf_counter()
        slots = self.pool.begin(tasks, groups, retry_group)
        if not self.running.keys().isdisjoint(slots):
            self.pool.end(slots)
            raise RuntimeError(_GONE)
        for slot, episode in zip(slots, episodes):
            self.running[slot], self._slots[episode.number] = episode, slot
        self._opening.update(slots)
        if not self.session.waiting:
            self.stats.environment_time += time.perf_counter() - clock

    def observe(self) -> None:
        """Receive answers of environments. Wait for them if the session is idle."""
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
        self._end([episode for episode in asked if not self._goes_on(episode)])

    def act(self) -> None:
        """Send the actions that the session returns. Wait for them, briefly if environments may answer."""
        answers = self.session.answers(POLL_SECONDS if len(self.running) > self.session.waiting else IDLE_POLL_SECONDS)
        while self.together and self.session.waiting:
            answers += self.session.answers(IDLE_POLL_SECONDS)
        self._send(answers)

    def rest(self, environments: bool = False) -> None:
        """Wait until the session has answered and, with `environments`, until these have. Ask nothing."""
        while self.session.waiting:
            self._send(self.session.answers(IDLE_POLL_SECONDS))
        if environments:
            self._take_all()

    def _take(self, timeout: float | None) -> list[Episode]:
        """Receive answers, queue the episodes that continue, and return the episodes that have ended."""
        answers, requests, over = self.pool.receive(timeout), {}, []
        if timeout is None and self.running and not answers:  # none is pending: this would loop forever
            raise RuntimeError(_GONE)
        for slot, answer in answers.items():
            episode = self.running[slot]
            if slot not in self._opening:
                episode.advance(answer)
            elif (request := self.prelude(episode, answer)) is not None:
                requests[slot] = request
                continue
            self._opening.discard(slot)
            (self._ready if self._goes_on(episode) else over).append(episode)
        self.pool.send(requests)
        self.stats.replayed_steps += len(requests)
        return over

    def _take_all(self) -> None:
        over = []
        while len(self._ready) + len(over) < len(self.running):
            over += self._take(timeout=None)
        self._end(sorted(over, key=lambda episode: episode.number))

    def _send(self, answers: Sequence[tuple[Episode, Step | None]]) -> None:
        actions, over = {}, []
        for episode, step in answers:
            if step is None:
                over.append(episode)
                continue
            step.policy_version = self.policy_version
            episode.steps.append(step)
            actions[self._slots[episode.number]] = step.action
            self.stats.turns = max(self.stats.turns, len(episode.steps))
        self.stats.num_steps += len(actions)
        self.pool.send(actions)
        self._end(over)

    def _goes_on(self, episode: Episode) -> bool:
        return episode.outcome is None and episode.turns < self.max_turns

    def _end(self, episodes: Sequence[Episode]) -> None:
        """Free the slots of episodes that have ended or run out of turns."""
        slots = [self._slots.pop(episode.number) for episode in episodes]
        self.pool.end(slots)
        for slot, episode in zip(slots, episodes):
            del self.running[slot]
            if self.on_end:
                self.on_end(episode)
