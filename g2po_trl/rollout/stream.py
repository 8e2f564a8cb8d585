"""Episodes without turns: each is asked for its next action as soon as its observation is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..environments.pool import EnvironmentPool
from ..trajectory import Step
from .branching import HeldBack
from .episodes import Episode
from .returning import ask_back, take_back
from .stats import RolloutStats

A_MOMENT = 0.005  # seconds to wait for the engine while environments may answer
A_WHILE = 1.0  # and while none will
_GONE = (
    "somebody else has ended the live episodes of this pool: use no EnvironmentPool.reset, check or end() beside a "
    "trainer, but Player.play"
)


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
        stats: what it cost is added to them. `environment_time` is that in which there was nothing else to do.
        on_turn: called with (turns of the longest episode, live episodes) whenever one of the two has changed.
        on_end: called once with each episode, as soon as it is over.
        in_turns: wait for all environments before the session is asked for answers: it answers all at once.
        policy_version: noted in each step.

    `live` are the episodes under way, by the pool's slots.
    """

    pool: EnvironmentPool
    session: StreamingSession
    max_turns: int
    stats: RolloutStats
    on_turn: Callable[[int, int], None] | None = None
    on_end: Callable[[Episode], None] | None = None
    in_turns: bool = False
    policy_version: int | None = None
    live: dict[int, Episode] = field(default_factory=dict, init=False)
    _slots: dict[int, int] = field(default_factory=dict, init=False)  # by the episode's number
    _ready: list[Episode] = field(default_factory=list, init=False)  # to be asked
    _returning: set[int] = field(default_factory=set, init=False)  # slots of branches on their way to where they begin

    def play(
        self,
        episodes: Sequence[Episode],
        tasks: Sequence[dict[str, Any]],
        groups: Sequence[Any],
        held_back: HeldBack | None = None,
    ) -> None:
        """Play each episode on its task. All of them are over when it returns.

        Args:
            held_back: says when each of them begins. `None`: at once.
        """
        place, family, on_end = {e.number: i for i, e in enumerate(episodes)}, object(), self.on_end

        def ended(episode: Episode) -> None:
            held_back.ended(episode)
            if on_end:
                on_end(episode)

        self.on_end = ended if held_back else on_end
        begin = held_back.take() if held_back else episodes
        try:
            while begin or self.live:
                if begin:
                    places = [place[episode.number] for episode in begin]
                    self.begin(begin, [tasks[i] for i in places], [groups[i] for i in places], family)
                if self.live:
                    self.advance()
                begin = held_back.take() if held_back else ()
        finally:
            self.on_end = on_end
            self.pool.end(self.live)

    def begin(
        self,
        episodes: Sequence[Episode],
        tasks: Sequence[dict[str, Any]],
        groups: Sequence[Any],
        family: Any = None,
    ) -> None:
        """Open these beside those that are live; see `EnvironmentPool.begin`. Branches are asked when they are where
        they begin; nobody waits for it."""
        slots = self.pool.begin(tasks, groups, family)
        if not self.live.keys().isdisjoint(slots):
            self.pool.end(slots)
            raise RuntimeError(_GONE)
        for slot, episode in zip(slots, episodes):
            self.live[slot], self._slots[episode.number] = episode, slot
            if episode.branch is not None:
                self._returning.add(slot)

    def take_over(self, other: Stream) -> None:
        """Go on with the episodes of another that is at rest."""
        self.live, self._slots, self._ready = other.live, other._slots, other._ready
        self._returning = other._returning

    def advance(self) -> None:
        """Look at what has come, ask about it, and send actions that are there. Waits for something to do."""
        before = self.stats.turns, len(self.live)
        self.observe()
        self.answer()
        if self.on_turn and before != (self.stats.turns, len(self.live)):
            self.on_turn(self.stats.turns, len(self.live))

    def answer(self) -> None:
        """Ask about what `observe` has taken, and send actions that are there."""
        asked, self._ready = self._ready, []
        self.session.ask(asked)
        self._end([episode for episode in asked if not self._goes_on(episode)])
        self.act(A_MOMENT if len(self.live) > self.session.waiting else A_WHILE)
        while self.in_turns and self.session.waiting:
            self.act(A_WHILE)

    def act(self, timeout: float) -> None:
        """Send the actions that are there, waiting for the first at most so many seconds."""
        if not self.session.waiting:
            return
        actions = {}
        for episode, step in self.session.answers(timeout):
            step.policy_version = self.policy_version
            episode.steps.append(step)
            actions[self._slots[episode.number]] = step.action
            self.stats.turns = max(self.stats.turns, len(episode.steps))
        self.stats.live_steps += len(actions)
        self.pool.send(actions)

    def rest(self, environments: bool = False) -> None:
        """Wait until the session has answered what it was asked; or until nothing is under way at all. Nobody is asked
        again: `advance` goes on from there."""
        while self.session.waiting:
            self.act(A_WHILE)
        while environments and len(self._ready) < len(self.live):
            self._take(timeout=None)

    def observe(self) -> None:
        """Take what environments have answered; wait for it where there is nothing else to do."""
        clock, idle = time.perf_counter(), not self.session.waiting
        self._take(timeout=None if idle and not self._ready else 0.0)
        while self.in_turns and len(self._ready) < len(self.live):
            self._take(timeout=None)
        if idle:
            self.stats.environment_time += time.perf_counter() - clock

    def _take(self, timeout: float | None) -> None:
        seen = self.pool.receive(timeout)
        if timeout is None and self.live and not seen:  # none is owed: this would go on for ever
            raise RuntimeError(_GONE)
        returning = {slot: self.live[slot] for slot in seen if slot in self._returning}
        for slot, episode in returning.items():
            if episode.observation is None:
                episode.open(seen[slot])
            else:
                take_back(episode, seen[slot])
        asked = ask_back(self.pool, returning)
        self.stats.replayed_steps += len(asked)
        self._returning -= returning.keys() - asked.keys()
        for slot in seen.keys() - returning.keys():
            self.live[slot].take(seen[slot])
        episodes = [self.live[slot] for slot in seen if slot not in asked]
        self._ready += [episode for episode in episodes if self._goes_on(episode)]
        self._end([episode for episode in episodes if not self._goes_on(episode)])

    def _goes_on(self, episode: Episode) -> bool:
        return episode.outcome is None and episode.turns < self.max_turns

    def _end(self, episodes: Sequence[Episode]) -> None:
        """These are over; their slots are free, also of those that ran out of turns."""
        slots = [self._slots.pop(episode.number) for episode in episodes]
        self.pool.end(slots)
        for slot, episode in zip(slots, episodes):
            del self.live[slot]
            if self.on_end:
                self.on_end(episode)
