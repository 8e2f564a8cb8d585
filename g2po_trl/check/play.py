"""Episodes of random answers or an expert's in worker processes, and their replay in others, for `g2po check`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..environments.causes import describe_failure
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..evaluation.agents import TextActor
from ..prompts.conversation import ChatResponse
from ..rollout.episode import Episode, sent
from ..rollout.player import Player
from ..trajectory import Step, Trajectory
from ..utils.show import different_parts
from .findings import Finding, Kind

TEXTS = ("yes", "no", "1", "2", "I do not know.")
TEXT_SHARE = 0.1  # of the responses to requests with tools
Answer = Callable[[Episode], str | ChatResponse | None]


@dataclass
class Played:
    """Episodes grouped by task, and the failures of others."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    failures: list[EnvironmentFailure] = field(default_factory=list)

    @property
    def episodes(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def steps(self) -> list[Step]:
        return [step for trajectory in self.episodes for step in trajectory.steps]

    @property
    def has_tools(self) -> bool:
        return any(step.call is not None for step in self.steps)

    @property
    def lists_actions(self) -> bool:
        return all(step.admissible_actions is not None for step in self.steps if step.messages is None)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Add episodes to the last group, except failures of the environment."""
        self.failures += [failure_of(trajectory) for trajectory in trajectories if not trajectory.counted]
        self.groups[-1] += [trajectory for trajectory in trajectories if trajectory.counted]


def slow(failures: Sequence[EnvironmentFailure]) -> list[EnvironmentFailure]:
    """Return the time-outs and crashes, after which another episode may take as long as the time limit."""
    return [failure for failure in failures if failure.kind not in ("exception", "invalid")]


def failure_of(trajectory: Trajectory) -> EnvironmentFailure:
    """Return the failure that ended an episode without a result."""
    return EnvironmentFailure(*trajectory.error.split(": ", 1))


@dataclass
class AnswerActor(TextActor):
    """An actor without a model. `choose`: an episode -> the action, the response to its request, or `None`."""

    choose: Answer

    def answer(self, episodes: Sequence[Episode]) -> list[Step | None]:
        return list(map(self._step, episodes))

    def _step(self, episode: Episode) -> Step | None:
        answer, request = self.choose(episode), episode.observation.request
        if answer is None:
            return episode.give_up("no answer: the expert gave up")
        if isinstance(answer, str):
            return episode.step(answer, None)
        call = request.call_in(answer.message(), answer.content, valid=True)
        return episode.step(answer.to_action(), None, messages=list(request.messages), call=call)


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
    schema = schema if isinstance(schema, Mapping) else {}  # `True` allows any value
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
    played, player = Played(), Player(pool, AnswerActor(choose), limits)
    for task in tasks:
        played.groups.append([])
        for _ in range(episodes):
            if not slow(played.failures):
                played.add(player.play([task])[0])
    return played


def replay_difference(
    pool: EnvironmentPool, task: dict[str, Any], steps: Sequence[Step], final: str | None = None
) -> Finding | None:
    """Play an episode's actions again and return a finding about the first difference, if any.

    `final` is the observation after them. It is an error if the episode begins differently or fails.
    """

    def found(difference: str, is_error: bool = False) -> Finding:
        return Kind.NOT_REPLAYED.found("error" if is_error else "warning", difference=difference)

    actor = AnswerActor(lambda episode: sent(steps[len(episode.steps)]))
    (again,), _ = Player(pool, actor, EpisodeLimits(max_turns=len(steps))).play([task])
    if not again.counted:
        return found(f"it {describe_failure(failure_of(again))}", is_error=True)
    for number, (now, before) in enumerate(zip(again.steps, steps), 1):
        for name in ("observation", "images", "admissible_actions", "state_key", "reward"):
            values = getattr(now, name), getattr(before, name)
            if values[0] != values[1]:
                new, old = different_parts(*map(str, values))
                is_start = number == 1 and name != "reward"
                return found(f"at step {number}, {name} is {new!r}, and was {old!r}", is_error=is_start)
    if len(again.steps) < len(steps):
        reason = again.failure_reason or "by itself"
        text = f"the episode ended after {again.steps[-1].action!r} ({reason}), and continued before"
        return found(text, is_error=reason.startswith("agent error"))
    if final not in (None, again.final_observation):
        now, before = different_parts(str(again.final_observation), final)
        return found(f"after the last step, the observation is {now!r}, and was {before!r}")
    return None
