"""The loop that plays episodes: what an episode goes through between its environment and the model.

    begin      its environment is reset, in a slot of the pool
    observe    the environment's answer is taken: the episode is ready to be asked, or it is over
    ask        the session is handed the episodes that are ready
    act        the session's steps are appended, and their actions sent to the environments; then `observe` again

A loop streams: each episode is asked as soon as its own observation is there. Or it plays turns, all episodes
`together`: for engines that answer a batch at a time, and for ranks that must generate together.
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

A_MOMENT, A_WHILE = 0.005, 1.0  # seconds to wait for the session while environments may answer, and while none will
_GONE = (
    "somebody else has ended the live episodes of this pool: use no EnvironmentPool.reset, check or end() beside a "
    "trainer, but Player.play"
)


class Session(Protocol):
    """What answers observations during one rollout. `waiting`: number of episodes asked and not answered."""

    waiting: int

    def ask(self, episodes: Sequence[Episode]) -> None:
        """Take episodes whose observation is to be answered. May end some, by `Episode.give_up`."""

    def answers(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        """Return the next steps of some of the episodes asked; `None` for an episode that the session has ended.

        A session that streams waits for the first at most `timeout` seconds. Another answers all at once; if it is
        collective, every rank calls this as often as any, also with nothing asked.
        """


@dataclass
class Loop:
    """Plays episodes to their ends.

    Args:
        pool: hosts the environments.
        session: answers observations.
        max_turns: an episode is over after this many turns.
        stats: costs are added to them; `environment_time` is that with nothing else to do.
        together: play turns: all environments have answered before the session is asked, and the session has before
            actions are sent.
        any_live: whether this rank has live episodes -> whether any has. Ranks that generate together call it once a
            turn and go on until none has. Default: for a rank on its own.
        prelude: takes each environment's answers until its episode can be asked, and returns the action to send in
            between, or `None`. Default: the first observation opens the episode.
        on_turn: called with (turns of the longest episode, live episodes) when one of them has changed.
        on_end: called with each episode when it is over.
        policy_version: noted in each step.

    `live` holds the episodes under way, by the pool's slots.
    """

    pool: EnvironmentPool
    session: Session
    max_turns: int
    stats: RolloutStats
    together: bool = False
    any_live: Callable[[bool], bool] = bool
    prelude: Callable[[Episode, Answer], str | None] = Episode.open
    on_turn: Callable[[int, int], None] | None = None
    on_end: Callable[[Episode], None] | None = None
    policy_version: int | None = None
    live: dict[int, Episode] = field(default_factory=dict, init=False)
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
            episodes: those that begin at once.
            tasks: arguments of `reset`, by the number of an episode.
            groups: group of each task, see `EnvironmentPool.begin`.
            more: returns further episodes that may begin by now, each once. Default: there are none.
        """
        retry_group = object()

        def begin(new: Sequence[Episode]) -> None:
            if new:
                self.begin(new, [tasks[e.number] for e in new], [groups[e.number] for e in new], retry_group)

        try:
            begin(episodes)
            progress = 0, len(self.live)
            while True:
                self.observe()
                self.ask()
                begin(more())
                before, progress = progress, (self.stats.turns, len(self.live))
                if self.on_turn and progress != before:
                    self.on_turn(*progress)
                if not self.any_live(bool(self.live)):
                    break
                self.act()
        finally:
            self.pool.end(self.live)

    def begin(
        self,
        episodes: Sequence[Episode],
        tasks: Sequence[dict[str, Any]],
        groups: Sequence[Any],
        retry_group: object = None,
    ) -> None:
        """Reset an environment for each episode, beside those that are live; see `EnvironmentPool.begin`."""
        clock = time.perf_counter()
        slots = self.pool.begin(tasks, groups, retry_group)
        if not self.live.keys().isdisjoint(slots):
            self.pool.end(slots)
            raise RuntimeError(_GONE)
        for slot, episode in zip(slots, episodes):
            self.live[slot], self._slots[episode.number] = episode, slot
        self._opening.update(slots)
        if not self.session.waiting:
            self.stats.environment_time += time.perf_counter() - clock

    def observe(self) -> None:
        """Take what environments have answered. Wait for it if there is nothing else to do."""
        clock, idle = time.perf_counter(), not self.session.waiting
        if self.together:
            self._take_all()
        else:
            self._end(self._take(timeout=None if idle and not self._ready else 0.0))
        if idle:
            self.stats.environment_time += time.perf_counter() - clock

    def ask(self) -> None:
        """Hand the session the episodes that are ready, in the order of their numbers."""
        asked, self._ready = sorted(self._ready, key=lambda episode: episode.number), []
        if asked:
            self.session.ask(asked)
        self._end([episode for episode in asked if not self._goes_on(episode)])

    def act(self) -> None:
        """Send the actions that the session has. Wait for them, but not for long if environments may answer."""
        answers = self.session.answers(A_MOMENT if len(self.live) > self.session.waiting else A_WHILE)
        while self.together and self.session.waiting:
            answers += self.session.answers(A_WHILE)
        self._send(answers)

    def rest(self, environments: bool = False) -> None:
        """Wait until the session has answered; with `environments`, until they have, too. Nothing is asked."""
        while self.session.waiting:
            self._send(self.session.answers(A_WHILE))
        if environments:
            self._take_all()

    def _take(self, timeout: float | None) -> list[Episode]:
        """Take the answers that have come. Episodes that go on are ready then; return those that are over."""
        answers, requests, over = self.pool.receive(timeout), {}, []
        if timeout is None and self.live and not answers:  # none is owed: this would go on for ever
            raise RuntimeError(_GONE)
        for slot, answer in answers.items():
            episode = self.live[slot]
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
        while len(self._ready) + len(over) < len(self.live):
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
        self.stats.live_steps += len(actions)
        self.pool.send(actions)
        self._end(over)

    def _goes_on(self, episode: Episode) -> bool:
        return episode.outcome is None and episode.turns < self.max_turns

    def _end(self, episodes: Sequence[Episode]) -> None:
        """Free the slots of episodes that are over, also of those that ran out of turns."""
        slots = [self._slots.pop(episode.number) for episode in episodes]
        self.pool.end(slots)
        for slot, episode in zip(slots, episodes):
            del self.live[slot]
            if self.on_end:
                self.on_end(episode)
