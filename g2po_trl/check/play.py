"""Random episodes of an environment or an agent in a worker process, for `g2po check`."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..credit.state_keys import assign_keys, make_state_key
from ..engines.sampling import Sampling
from ..environments.contract import Observation, StepResult, TextEnvironment
from ..environments.episode_limits import EpisodeLimits
from ..environments.failures import describe_failure
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.tools.trl_tools import random_arguments
from ..environments.validation import factory_name
from ..prompts.conversation import ChatRequest, ChatResponse, message_text
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..rollout.stats import RolloutStats
from ..trajectory import Step, Trajectory
from .contract import Finding, contract_findings

TEXTS = ("yes", "no", "1", "2", "I do not know.")
TEXT_SHARE = 0.1  # of the responses to requests with tools
_PROBE = "\x00probe"  # column of a task whose reset returns findings


@dataclass
class Played:
    """Episodes grouped by task, and measurements; `longest`: maximum characters of an observation or request."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    failures: list[EnvironmentFailure] = field(default_factory=list)
    reset_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    longest: int = 0
    has_tools: bool = False
    has_task: bool = True
    lists_actions: bool = True
    lists_some: bool = False

    @property
    def episodes(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def steps(self) -> list[Step]:
        return [step for trajectory in self.episodes for step in trajectory.steps]

    @property
    def takes_long(self) -> bool:
        """Whether further episodes may take as long as the time limit, since one timed out or crashed."""
        return any(failure.kind not in ("exception", "invalid") for failure in self.failures)

    def fail(self, trajectories: Sequence[Trajectory]) -> None:
        self.failures += [EnvironmentFailure(*t.error.split(": ", 1)) for t in trajectories if not t.counted]

    def ignore(self, details: Iterable[str] | None) -> None:
        """Leave details out of the keys, as training with `state_key_ignores` does."""
        if details:
            assign_keys(self.episodes, make_state_key(None, details))

    def note(self, observation: Observation, is_first: bool) -> None:
        request = observation.request
        if request is None:
            self.longest = max(self.longest, len(observation.text))
            self.has_task &= bool(observation.task) or not is_first
            self.lists_actions &= observation.admissible_actions is not None
            self.lists_some |= observation.admissible_actions is not None
        else:
            self.has_tools |= bool(request.tools)
            shown = sum(len(message_text(message)) for message in request.messages)
            self.longest = max(self.longest, shown + len(json.dumps(request.tools or "")))


@dataclass
class RandomActor:
    """Answers one episode at a time: with a listed action, or a chat request with a random call or one of `texts`."""

    played: Played
    rng: random.Random
    texts: Sequence[str] = TEXTS
    asked: list[Episode] = field(default_factory=list)
    sent: float = 0.0
    is_collective = streams = False

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> RandomActor:
        self.asked, self.sent = [], time.perf_counter()
        return self

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked = list(episodes)
        for episode in episodes:
            self._time(episode)
            self.played.note(episode.observation, is_first=not episode.steps)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        steps = [(episode, self._step(episode)) for episode in self.asked]
        self.asked, self.sent = [], time.perf_counter()
        return steps

    def ended(self, episode: Episode) -> None:
        if episode.steps and episode.error is None:
            self._time(episode)

    def close(self) -> None:
        pass

    def _time(self, episode: Episode) -> None:
        seconds = self.played.step_seconds if episode.steps else self.played.reset_seconds
        seconds.append(time.perf_counter() - self.sent)

    def _step(self, episode: Episode) -> Step:
        request = episode.observation.request
        if request is None:
            return episode.step(self.rng.choice(episode.observation.admissible_actions or ["look"]), None)
        action = random_response(request, self.rng, self.texts).to_action()
        return episode.step(action, None, messages=list(request.messages))


def random_response(request: ChatRequest, rng: random.Random, texts: Sequence[str]) -> ChatResponse:
    """Return a call of a random tool with random arguments, or one of the texts."""
    if not request.tools or rng.random() < TEXT_SHARE:
        return ChatResponse(rng.choice(texts))
    function = rng.choice(request.tools)["function"]
    call = {"type": "function", "function": {"name": function["name"], "arguments": random_arguments(function, rng)}}
    return ChatResponse("", (call,), "tool_calls")


def play_at_random(
    pool: EnvironmentPool,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    limits: EpisodeLimits,
    seed: int,
    texts: Sequence[str],
) -> Played:
    """Play random episodes of each task, one after another, until one times out or crashes."""
    played = Played()
    actor = RandomActor(played, random.Random(seed), texts)
    player = Player(pool, actor, limits)
    for task in tasks:
        group: list[Trajectory] = []
        while len(group) < episodes and not played.takes_long:
            (trajectory,), _ = player.play([task], on_end=actor.ended)
            group.append(trajectory)
            played.fail([trajectory])
        played.groups.append([trajectory for trajectory in group if trajectory.counted])
    return played


def probe(pool: EnvironmentPool, task: dict[str, Any], turns: int) -> list[Finding]:
    """Return the contract findings of a task, from a worker of an environment that `probed` made."""
    (answer,) = pool.reset([{**task, _PROBE: turns}])
    if isinstance(answer, EnvironmentFailure):
        return [Finding("error", f"a probe of its contract {describe_failure(answer)}")]
    return [Finding(*found) for found in json.loads(answer.text)]


def probed(environment_factory: Callable[[], TextEnvironment]) -> Callable[[], TextEnvironment]:
    """Return a factory of the environment whose contract `probe` examines in a worker."""

    def make() -> TextEnvironment:
        return _ProbedEnvironment(environment_factory)

    make.__name__ = factory_name(environment_factory)
    return make


class _ProbedEnvironment(TextEnvironment):
    """An environment in a worker. The reset of a task with the column `_PROBE` returns contract findings as JSON."""

    def __init__(self, environment_factory: Callable[[], TextEnvironment]):
        self.factory, self.environment = environment_factory, None

    def reset(self, **task) -> Observation | str:
        if (max_steps := task.pop(_PROBE, None)) is not None:
            found = contract_findings(self.factory, task, max_steps=max_steps)
            return json.dumps([[finding.level, finding.text, finding.remedy] for finding in found])
        self.environment = self.environment or self.factory()
        return self.environment.reset(**task)

    def step(self, action: str) -> StepResult:
        return self.environment.step(action)

    def close(self) -> None:
        if self.environment:
            self.environment.close()
