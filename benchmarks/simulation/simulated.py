"""A virtual clock, and on it what a rollout waits for: environments in workers, an engine, and a session between them.

They take the places of `EnvironmentPool` and of an actor's session, so that the loops that play rollouts run as they
are. Nothing is computed and nothing sleeps: whoever would wait moves the clock to when it would be over. What would
take how long, and how many turns and tokens there are, is given (`Recorded`).

The engine is a vLLM of the loop's own process: it computes while the loop is in `answers`, a token of each sequence at
a time, and the loop looks at the environments in between. Environments go on meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g2po_trl import Observation, StepResult
from g2po_trl.environments.pool.placement import place_groups
from g2po_trl.rollout.episode import Episode
from g2po_trl.trajectory import Step

FIRST_RESET, RESET, STEP = "first reset of a group in a worker", "reset", "step"


@dataclass
class Clock:
    """`now`: seconds since it began."""

    now: float = 0.0


@dataclass(frozen=True)
class Recorded:
    """What an episode does, whatever plays it.

    Args:
        prompts, completions: tokens of each turn. waits: seconds that each step waits, for something that is no core.
        ends: the environment ends it after its last turn; else it runs out of turns.
    """

    prompts: Sequence[int]
    completions: Sequence[int]
    waits: Sequence[float]
    ends: bool

    @property
    def turns(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class PoolCosts:
    """Of environments, in seconds.

    Args:
        workers: processes, each of which plays one reset or step at a time.
        cores: that do the work of resets and steps, beside what these wait for; `None`: as many as workers.
        first_reset, reset, step: work of the first reset of a group in a worker, of the others, and of a step.
    """

    workers: int
    step: float
    reset: float
    first_reset: float
    cores: int | None = None


class SimulatedPool:
    """As `EnvironmentPool`. A task's `episodes` are what the members of its group do, as they begin one after another.
    Groups are placed by the pool's own rules. An observation is a number, by which `recorded` has what its episode
    does.
    """

    environment_names = ()

    def __init__(self, clock: Clock, costs: PoolCosts):
        self.clock, self.costs = clock, costs
        self.recorded: dict[str, Recorded] = {}
        self.live: dict[int, list[Any]] = {}  # by slot: name of what is recorded, its worker, its group, turns played
        self.pending: set[int] = set()
        self.answers: dict[int, Observation | StepResult] = {}
        self.working = 0.0  # seconds, of all workers
        self._jobs: list[deque] = [deque() for _ in range(costs.workers)]  # the first is under way
        self._cores = [0.0] * (costs.cores or costs.workers)  # when each is free
        self._events: list[tuple[float, int, bool, int]] = []  # when, in order, is done or needs a core, worker
        self._number = 0
        self._names, self._members = itertools.count(), Counter()  # members that have begun, by group

    # As the loops call it.

    def begin(
        self,
        tasks: Sequence[Mapping[str, Any]],
        groups: Sequence[Hashable] | None = None,
        retry_group: Hashable = None,
    ) -> list[int]:
        groups = [object() for _ in tasks] if groups is None else groups
        load = [0] * self.costs.workers
        for _, worker, _, _ in self.live.values():
            load[worker] += 1
        homes = place_groups(groups, load)
        taken = self.live.keys() | self.answers.keys()
        free = [slot for slot in range(len(tasks) + len(taken)) if slot not in taken]
        slots, known = [], {(worker, group) for _, worker, group, _ in self.live.values()}
        for slot, task, group, worker in zip(free, tasks, groups, homes):
            kind = RESET if (worker, group) in known else FIRST_RESET
            known.add((worker, group))
            name, members = str(next(self._names)), task["episodes"]
            self.recorded[name] = members[self._members[group] % len(members)]
            self._members[group] += 1
            self.live[slot] = [name, worker, group, 0]
            slots.append(slot)
            self._submit(slot, kind, 0.0, self.costs.reset if kind == RESET else self.costs.first_reset)
        return slots

    def send(self, actions: Mapping[int, str]) -> None:
        for slot in actions:
            if slot in self.pending or slot not in self.live:
                raise ValueError(f"slot {slot} has a pending answer, or no running episode")
            name, _, _, turn = self.live[slot]
            self._submit(slot, STEP, self.recorded[name].waits[turn], self.costs.step)

    def receive(self, timeout: float | None = 0.0) -> dict[int, Any]:
        until = math.inf if timeout is None else self.clock.now + timeout
        self._run(self.clock.now)
        while not self.answers and self.pending and self.next_event <= until:
            self._run(self.next_event)
        if not self.answers and self.pending:
            self.clock.now = max(self.clock.now, until)
        answers, self.answers = self.answers, {}
        return answers

    def end(self, slots: Iterable[int] | None = None) -> None:
        for slot in [*self.live, *self.answers] if slots is None else list(slots):
            self.live.pop(slot, None)
            self.answers.pop(slot, None)
            self.pending.discard(slot)

    # On the clock.

    @property
    def next_event(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _submit(self, slot: int, kind: str, wait: float, work: float) -> None:
        self.pending.add(slot)
        episode, worker = self.live[slot], self.live[slot][1]
        self._jobs[worker].append((slot, episode, kind, wait, work))
        if len(self._jobs[worker]) == 1:
            self._start(worker, self.clock.now)

    def _start(self, worker: int, now: float) -> None:
        _, _, _, wait, _ = self._jobs[worker][0]
        self._push(now + wait, False, worker)

    def _push(self, when: float, done: bool, worker: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, done, worker))

    def _run(self, until: float) -> None:
        """What happens until then; the clock is not put back."""
        while self._events and self._events[0][0] <= until:
            now, _, done, worker = heapq.heappop(self._events)
            slot, episode, kind, wait, work = self._jobs[worker][0]
            if not done:
                core = heapq.heappop(self._cores)
                end = max(now, core) + work
                heapq.heappush(self._cores, end)
                self._push(end, True, worker)
                continue
            self.working += wait + work
            self._jobs[worker].popleft()
            if self._jobs[worker]:
                self._start(worker, now)
            if self.live.get(slot) is episode:
                self.pending.discard(slot)
                self.answers[slot] = self._answer(slot, kind)
        self.clock.now = max(self.clock.now, until)

    def _answer(self, slot: int, kind: str) -> Observation | StepResult:
        episode = self.live[slot]
        name = episode[0]
        if kind != STEP:
            return Observation(name)
        episode[3] += 1
        recorded = self.recorded[name]
        over = recorded.ends and episode[3] == recorded.turns
        if over:
            del self.live[slot]
        return StepResult(Observation(name), terminated=over, reward=float(over))


@dataclass(frozen=True)
class EngineCosts:
    """Of a language model's engine: seconds, unless said otherwise.

    Args:
        step: a forward pass, whatever is in it. sequence: each sequence that gets a token in it.
        context: each token that such a sequence has before it. prompt_token: each prompt token that is read in it.
        max_sequences, max_tokens: at most so many in one pass. kv_tokens: of prompts and completions in the cache.
        prompt, prompt_text: of the loop's process, to build a prompt and read its completion, and per prompt token.
    """

    step: float
    sequence: float = 0.0
    context: float = 0.0
    prompt_token: float = 0.0
    max_sequences: int = 1024
    max_tokens: int = 4096
    kv_tokens: float = math.inf
    prompt: float = 0.0
    prompt_text: float = 0.0


class SimulatedEngine:
    """Continuous batching with prompts read in parts, first come, first served. A sequence has room in the cache for
    all of its tokens before it begins."""

    def __init__(self, clock: Clock, costs: EngineCosts):
        self.clock, self.costs = clock, costs
        self.computing = 0.0  # seconds
        self.tokens = 0  # of completions
        self._queue: deque[list] = deque()  # key, prompt tokens to read, prompt, completion
        # pass that ends it, in order, key, prompt, completion
        self._running: list[tuple[int, int, Any, int, int]] = []
        self._passes = self._number = self._held = 0
        self._load = 0.0  # seconds that running sequences add to a pass

    def submit(self, key: Any, prompt: int, completion: int) -> None:
        self._queue.append([key, prompt, prompt, completion])

    def advance(self, until: float = math.inf) -> list[Any]:
        """Compute until some completion is complete, or a pass ends then or later: the keys of the complete ones."""
        finished: list[Any] = []
        while (self._queue or self._running) and not finished:
            read, new = self._read()
            seconds = self.costs.step + self._load + read * self.costs.prompt_token
            passes = 1
            if not read:
                passes = self._running[0][0] - self._passes
                passes = max(
                    1, min(passes, math.ceil((until - self.clock.now) / seconds) if until < math.inf else passes)
                )
            self._passes += passes
            self.tokens += passes * len(self._running) + len(new)
            self.computing += passes * seconds
            self.clock.now += passes * seconds
            for key, _, prompt, completion in new:  # a prompt's last part gives the first token
                self._number += 1
                heapq.heappush(self._running, (self._passes + completion - 1, self._number, key, prompt, completion))
                self._load += self._added(prompt, completion)
            while self._running and self._running[0][0] <= self._passes:
                _, _, key, prompt, completion = heapq.heappop(self._running)
                self._load = self._load - self._added(prompt, completion) if self._running else 0.0
                self._held -= prompt + completion
                finished.append(key)
            if self.clock.now >= until:
                break
        return finished

    def _read(self) -> tuple[int, list[list]]:
        """Prompt tokens of the next pass, and those sequences whose prompt is read thereby."""
        room, new = self.costs.max_tokens - len(self._running), []
        read = 0
        while self._queue and room > read and len(self._running) + len(new) < self.costs.max_sequences:
            first = self._queue[0]
            _, left, prompt, completion = first
            if left == prompt:  # not begun
                if self._held and self._held + prompt + completion > self.costs.kv_tokens:
                    break
                self._held += prompt + completion
            part = min(left, room - read)
            first[1] -= part
            read += part
            if not first[1]:
                new.append(self._queue.popleft())
        return read, new

    def _added(self, prompt: int, completion: int) -> float:
        return self.costs.sequence + self.costs.context * (prompt + completion / 2)


@dataclass
class SimulatedSession:
    """Answers one by one."""

    engine: SimulatedEngine
    pool: SimulatedPool
    asked: dict[int, Episode] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def ask(self, episodes: Sequence[Episode]) -> None:
        costs, tokens = self.engine.costs, sum(self._sizes(episode)[0] for episode in episodes)
        self.engine.clock.now += len(episodes) * costs.prompt + tokens * costs.prompt_text
        for episode in episodes:
            self.asked[id(episode)] = episode
            self.engine.submit(id(episode), *self._sizes(episode))

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        episodes = [self.asked.pop(key) for key in self.engine.advance(self.pool.next_event)]
        return [(episode, episode.step("go", None)) for episode in episodes]

    def _sizes(self, episode: Episode) -> tuple[int, int]:
        recorded, turn = self.pool.recorded[episode.observation.text], len(episode.steps)
        return recorded.prompts[turn], recorded.completions[turn]
