"""Episodes of random answers or an expert's in worker processes, and their replay in others, for `g2po check`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..environments.causes import describe_failure
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..evaluation.text_actor import TextActor
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

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], size: int) -> Played:
        """Return episodes in groups of one task, failures of the environment apart."""
        groups = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        failures = [failure_of(trajectory) for trajectory in trajectories if not trajectory.counted]
        return cls([[trajectory for trajectory in group if trajectory.counted] for group in groups], failures)

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
            return episode.give_up("no answer")
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
    if values := schema.get("enum", [schema["const"]] if "const" in schema else ()):
        return rng.choice(values)
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
    player, played = Player(pool, AnswerActor(choose), limits), []
    for task in [task for task in tasks for _ in range(episodes)]:
        played += player.play([task])[0]
        if not played[-1].counted and slow([failure_of(played[-1])]):
            break
    return Played.of(played, episodes)


def replay_difference(pool: EnvironmentPool, task: dict[str, Any], episodes: Sequence[Trajectory]) -> Finding | None:
    """Play the actions of a task's episodes again, concurrently, and return the first difference, if any."""
    actions = [iter(map(sent, episode.steps)) for episode in episodes]
    limits = EpisodeLimits(max_turns=max(len(episode.steps) for episode in episodes))
    player = Player(pool, AnswerActor(lambda again: next(actions[again.number], None)), limits)
    where = "next to another episode of their process" if len(episodes) > 1 else "in another process"
    for again, before in zip(player.play([task] * len(episodes), groups=[0] * len(episodes))[0], episodes):
        for difference, is_error in _differences(again, before):
            return Kind.NOT_REPLAYED.found("error" if is_error else "warning", where=where, difference=difference)
    return None


def _differences(again: Trajectory, before: Trajectory) -> Iterator[tuple[str, bool]]:
    """Yield what is different, and whether it is an error: the episode fails, or begins in another state."""
    if not again.counted:
        yield f"it {describe_failure(failure_of(again))}", True
        return
    for number, steps in enumerate(zip(again.steps, before.steps), 1):
        for name in ("observation", "images", "admissible_actions", "state_key", "reward"):
            if len(set(values := [str(getattr(step, name)) for step in steps])) > 1:
                now, old = different_parts(*values)
                is_error = number == 1 and name != "reward" and (name, steps[0].key) != ("observation", steps[1].key)
                yield f"at step {number}, {name} is {now!r}, and was {old!r}", is_error
    if len(again.steps) < len(before.steps):
        reason = again.failure_reason or "by itself"
        what = f"the episode ended after {again.steps[-1].action!r} ({reason}), and continued before"
        yield what, reason.startswith("agent error")
    if again.final_observation != before.final_observation:
        now, old = different_parts(str(again.final_observation), str(before.final_observation))
        yield f"after the last step, the observation is {now!r}, and was {old!r}", False
