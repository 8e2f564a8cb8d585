"""Episodes of random answers or an expert's in worker processes, and their replay in others, for `g2po check`."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.sampling import Sampling
from ..environments.contract import Observation, StepResult, TextEnvironment
from ..environments.episode_limits import EpisodeLimits
from ..environments.failures import describe_failure
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.validation import factory_name
from ..evaluation.agents import TextActor
from ..prompts.conversation import ChatResponse, message_text
from ..rollout.episode import Episode, sent
from ..rollout.player import Player
from ..rollout.stats import RolloutStats
from ..trajectory import Step, Trajectory
from ..utils.show import different_parts
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

    def add(self, trajectories: Sequence[Trajectory], is_new: bool = True) -> None:
        """Add episodes as a group, or to the last one; failures of the environment are kept apart."""
        self.groups += [[]] if is_new else []
        self.failures += [EnvironmentFailure(*t.error.split(": ", 1)) for t in trajectories if not t.counted]
        self.groups[-1] += [trajectory for trajectory in trajectories if trajectory.counted]

    def note(self, episode: Episode) -> None:
        """Measure the observation of an episode."""
        seen, request = episode.observation, episode.observation.request
        if request is None:
            self.longest = max(self.longest, len(seen.text))
            self.has_task &= bool(seen.task or episode.steps)
            self.lists_actions &= seen.admissible_actions is not None
        else:
            self.has_tools |= bool(request.tools)
            characters = sum(len(message_text(message)) for message in request.messages)
            self.longest = max(self.longest, characters + len(json.dumps(request.tools or "")))


@dataclass
class AnswerActor(TextActor):
    """An actor without a model, which plays one episode at a time and measures the environment.

    Args:
        played: receives the measurements.
        choose: an episode -> the action, the response to its chat request, or `None` to give up.
    """

    played: Played
    choose: Answer

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> AnswerActor:
        self.clock = time.perf_counter()
        return super().session(sampling, seeds, stats)

    def ask(self, episodes: Sequence[Episode]) -> None:
        super().ask(episodes)
        for episode in episodes:
            seconds = self.played.step_seconds if episode.steps else self.played.reset_seconds
            seconds.append(time.perf_counter() - self.clock)
            self.played.note(episode)

    def answer(self, episodes: Sequence[Episode]) -> Iterator[Step | None]:
        for episode in episodes:
            answer, request = self.choose(episode), episode.observation.request
            if answer is None:
                yield episode.give_up("no answer: the expert gave up")
            elif request is None:
                yield episode.step(answer, None)
            else:
                yield episode.step(answer.to_action(), None, messages=list(request.messages))
        self.clock = time.perf_counter()


def random_answer(rng: random.Random, texts: Sequence[str]) -> Answer:
    """Return a function that answers with a listed action, or a request with a random call or one of `texts`."""

    def answer(episode: Episode) -> str | ChatResponse:
        request = episode.observation.request
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
    pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], episodes: int, limits: EpisodeLimits, choose: Answer
) -> Played:
    """Play episodes of each task, one after another, until one times out or crashes."""
    played = Played()
    player = Player(pool, AnswerActor(played, choose), limits)
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

    class Probed(TextEnvironment):
        environment = None

        def reset(self, **task: Any) -> Observation | str:
            if (max_steps := task.pop(_PROBE, None)) is not None:
                findings = contract_findings(environment_factory, task, max_steps=max_steps)
                return json.dumps([[found.kind.name, found.level, found.facts] for found in findings])
            self.environment = self.environment or environment_factory()
            return self.environment.reset(**task)

        def step(self, action: str) -> StepResult:
            return self.environment.step(action)

        def close(self) -> None:
            if self.environment:
                self.environment.close()

    Probed.__name__ = factory_name(environment_factory)
    return Probed


def replay_difference(
    pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step], final: str | None = None
) -> Finding | None:
    """Replay an episode's steps in a pool without others, and return a finding about the first difference, if any.

    `final` is the observation after them. It is an error if the episode begins differently or fails.
    """

    def found(difference: str, is_error: bool = False) -> Finding:
        return Kind.NOT_REPLAYED.found(level="error" if is_error else "warning", difference=difference)

    answer = pool.reset([task])[0]
    for number, step in enumerate(steps, 1):
        if isinstance(answer, EnvironmentFailure):
            return found(f"it {describe_failure(answer)}", is_error=True)
        seen = answer if isinstance(answer, Observation) else answer.observation
        if seen.text != step.observation:
            now, was = different_parts(seen.text, step.observation)
            return found(f"before step {number}, the observation is {now!r}, and was {was!r}", is_error=number == 1)
        now = list(seen.images), seen.admissible_actions or None, seen.state_key
        before = step.images or [], step.admissible_actions or None, step.state_key
        for name, *values in zip(("images", "listed actions", "environment's state keys"), now, before):
            if values[0] != values[1]:
                return found(f"before step {number}, the {name} are different", is_error=number == 1)
        answer = pool.step({0: sent(step)})[0]
        if isinstance(answer, EnvironmentFailure):
            if number == len(steps):
                return found(f"it {describe_failure(answer)}", is_error=True)
            continue
        if number == len(steps):
            seen = answer.observation.text
            same = seen == (seen if final is None else final) and answer.reward == step.reward
            now, was = different_parts(seen, str(final))
            text = f"after the last step, the observation is {now!r} (reward {answer.reward:g}), and was {was!r}"
            return None if same else found(f"{text} (reward {step.reward:g})")
        if answer.terminated or answer.truncated:
            reason = answer.info.get("failure_reason") or ""
            text = f"the episode ended after {step.action!r} ({reason or 'by itself'}), and continued before"
            return found(text, is_error=reason.startswith("agent error"))
        if answer.reward != step.reward:
            return found(f"{step.action!r} returned reward {answer.reward:g}, and {step.reward:g} before")
    return None
