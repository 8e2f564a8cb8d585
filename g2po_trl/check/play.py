"""Episodes of random answers or an expert's in worker processes, and their replay in others, for `g2po check`."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..engines.sampling import Sampling
from ..environments.contract import Observation, StepResult, TextEnvironment
from ..environments.episode_limits import EpisodeLimits
from ..environments.failures import describe_failure
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.validation import factory_name
from ..prompts.conversation import ChatRequest, ChatResponse, message_text
from ..rollout.episode import Episode, sent
from ..rollout.player import Player
from ..rollout.stats import RolloutStats
from ..trajectory import Step, Trajectory
from .contract import contract_findings
from .findings import Finding, Kind

TEXTS = ("yes", "no", "1", "2", "I do not know.")
TEXT_SHARE = 0.1  # of the responses to requests with tools
_PROBE = "\x00probe"  # column of a task whose reset returns findings
Answer = Callable[[Episode], str | ChatResponse | None]


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

    @property
    def episodes(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def steps(self) -> list[Step]:
        return [step for trajectory in self.episodes for step in trajectory.steps]

    @property
    def answers_are_known(self) -> bool:
        """Whether tools or listed actions told what can be answered."""
        return self.has_tools or self.lists_actions

    @property
    def takes_long(self) -> bool:
        """Whether further episodes may take as long as the time limit, since one timed out or crashed."""
        return any(failure.kind not in ("exception", "invalid") for failure in self.failures)

    def add(self, trajectories: Sequence[Trajectory], is_new: bool = False) -> None:
        """Add episodes to the last group, or as a new one; failures of the environment are kept apart."""
        self.groups += [[]] if is_new else []
        self.failures += [EnvironmentFailure(*t.error.split(": ", 1)) for t in trajectories if not t.counted]
        self.groups[-1] += [trajectory for trajectory in trajectories if trajectory.counted]

    def note(self, observation: Observation, is_first: bool) -> None:
        request = observation.request
        if request is None:
            self.longest = max(self.longest, len(observation.text))
            self.has_task &= bool(observation.task) or not is_first
            self.lists_actions &= observation.admissible_actions is not None
        else:
            self.has_tools |= bool(request.tools)
            characters = sum(len(message_text(message)) for message in request.messages)
            self.longest = max(self.longest, characters + len(json.dumps(request.tools or "")))


@dataclass
class AnswerActor:
    """An actor without a model, which plays one episode at a time and measures the environment.

    Args:
        played: receives the measurements.
        answer: an episode -> the action, the response to its chat request, or `None` to give up.
    """

    played: Played
    answer: Answer
    asked: Sequence[Episode] = ()
    sent: float = 0.0
    is_collective = streams = False

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> AnswerActor:
        self.asked, self.sent = (), time.perf_counter()
        return self

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked = list(episodes)
        for episode in episodes:
            seconds = self.played.step_seconds if episode.steps else self.played.reset_seconds
            seconds.append(time.perf_counter() - self.sent)
            self.played.note(episode.observation, is_first=not episode.steps)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        steps = [(episode, self._step(episode)) for episode in self.asked]
        self.asked, self.sent = (), time.perf_counter()
        return steps

    def close(self) -> None:
        pass

    def _step(self, episode: Episode) -> Step | None:
        answer, request = self.answer(episode), episode.observation.request
        if answer is None:
            episode.give_up("no answer: the expert gave up")
            return None
        if request is None:
            return episode.step(answer, None)
        return episode.step(answer.to_action(), None, messages=list(request.messages))


def random_answer(rng: random.Random, texts: Sequence[str]) -> Answer:
    """Return a function that answers with a listed action, or a request with a random call or one of `texts`."""

    def answer(episode: Episode) -> str | ChatResponse:
        request: ChatRequest | None = episode.observation.request
        if request is None:
            return rng.choice(episode.observation.admissible_actions or ["look"])
        if not request.tools or rng.random() < TEXT_SHARE:
            return ChatResponse(rng.choice(texts))
        function = rng.choice(request.tools)["function"]
        chosen = {"name": function["name"], "arguments": random_arguments(function, rng)}
        return ChatResponse("", ({"type": "function", "function": chosen},), "tool_calls")

    return answer


def random_arguments(function: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random arguments of the right types for a function's description."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {name: _random_value(schema, rng) for name, schema in properties.items()}


def _random_value(schema: Any, rng: random.Random) -> Any:
    """Return a random value of a JSON schema's type; the schema `True` allows any value."""
    schema = schema if isinstance(schema, Mapping) else {}
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _random_value(rng.choice(choices), rng)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    values = {"integer": rng.randrange(10), "number": float(rng.randrange(10)), "boolean": rng.random() < 0.5}
    return (values | {"array": [], "object": {}, "null": None}).get(kind, rng.choice("abcdefgh"))


def play(
    pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], episodes: int, limits: EpisodeLimits, answer: Answer
) -> Played:
    """Play episodes of each task, one after another, until one times out or crashes."""
    played = Played()
    player = Player(pool, AnswerActor(played, answer), limits)
    for task in tasks:
        for number in range(episodes):
            if not played.takes_long:
                played.add(player.play([task])[0], is_new=number == 0)
    return played


def probe(pool: EnvironmentPool, task: dict[str, Any], turns: int) -> list[Finding]:
    """Return the contract findings of a task, from a worker of an environment that `probed` made."""
    (answer,) = pool.reset([{**task, _PROBE: turns}])
    if isinstance(answer, EnvironmentFailure):
        return [Kind.FAILED.found(what="a probe of its contract", failure=describe_failure(answer))]
    return [Finding(Kind[name], *more) for name, *more in json.loads(answer.text)]


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
            findings = contract_findings(self.factory, task, max_steps=max_steps)
            return json.dumps([[found.kind.name, found.level, found.facts] for found in findings])
        self.environment = self.environment or self.factory()
        return self.environment.reset(**task)

    def step(self, action: str) -> StepResult:
        return self.environment.step(action)

    def close(self) -> None:
        if self.environment:
            self.environment.close()


class Difference(NamedTuple):
    """The first difference of a replayed episode; `is_error`: it begins differently, or fails."""

    text: str
    is_error: bool = False


def replay_difference(pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step]) -> Difference | None:
    """Replay an episode's steps in a pool without others; return the first difference, or `None` if there is none."""
    answer = pool.reset([task])[0]
    for number, step in enumerate(steps, 1):
        if isinstance(answer, EnvironmentFailure):
            return Difference(f"it {describe_failure(answer)}", is_error=True)
        seen = answer if isinstance(answer, Observation) else answer.observation
        if different := _difference(step, seen):
            return Difference(f"before step {number}, {different}", is_error=number == 1)
        if number == len(steps):
            break
        answer = pool.step({0: sent(step)})[0]
        if isinstance(answer, EnvironmentFailure):
            continue
        if answer.terminated or answer.truncated:
            reason = answer.info.get("failure_reason") or ""
            text = f"the episode ended after {step.action!r} ({reason or 'by itself'}), and continued before"
            return Difference(text, is_error=reason.startswith("agent error"))
        if answer.reward != step.reward:
            return Difference(f"{step.action!r} returned reward {answer.reward:g}, and {step.reward:g} before")
    return None


def _difference(before: Step, seen: Observation) -> str | None:
    if seen.text != before.observation:
        return f"the observation is {seen.text[:200]!r}, and was {before.observation[:200]!r}"
    parts = {
        "images": (list(seen.images), before.images or []),
        "listed actions": (seen.admissible_actions or None, before.admissible_actions or None),
        "environment's state keys": (seen.state_key, before.state_key),
    }
    return next((f"the {name} are different" for name, (now, then) in parts.items() if now != then), None)
