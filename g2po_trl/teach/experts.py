"""Experts: what answers an observation in a demonstration.

An expert is a function of the environment's instance, which runs in the worker beside it; of an agent's request; a
recorded episode; or random. Its answer is an action (text), a call `{"name": …, "arguments": {…}}` or a list of calls,
a message `{"content": …, "tool_calls": […]}`, or `None`: it gives up.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from g2po_trl.check.play import random_arguments
from g2po_trl.engines.sampling import derived_seed
from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.loading import import_named, load
from g2po_trl.environments.setup import played_as
from g2po_trl.environments.tasks import task_id_of
from g2po_trl.environments.tools.trl_tools import ToolEnvironment, is_tool_environment
from g2po_trl.environments.validation import is_agent, validate_observation
from g2po_trl.prompts.conversation import ChatResponse, Message, normalize_messages
from g2po_trl.prompts.tool_calls import ProseTools
from g2po_trl.rollout.episode import Episode
from g2po_trl.trajectory import Trajectory
from g2po_trl.utils.options import require

Answer = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
Expert = Callable[[Episode, random.Random], Answer]


class ExpertEnvironment(TextEnvironment):
    """Runs an environment, and its expert on each state, in a worker.

    The answer travels to the player in the place of the state key, which no prompt shows; see `carried_answer`. The
    expert is a function of the environment's instance (of a class with tools, of that class's own), and of a seeded
    `random.Random` if it has a parameter `rng`.
    """

    def __init__(self, environment_factory: Callable[[], TextEnvironment], expert: Callable[..., Answer]):
        self.inner, self.expert = environment_factory(), expert
        self.shown = self.inner.inner if isinstance(self.inner, ToolEnvironment) else self.inner

    def reset(self, task_id: str, task: dict[str, Any], seed: int) -> Observation:
        self.rng = random.Random(seed)
        return self._with_answer(self.inner.reset(**task))

    def step(self, action: str) -> StepResult:
        result = self.inner.step(action)
        is_over = result.terminated or result.truncated
        return result if is_over else replace(result, observation=self._with_answer(result.observation))

    def close(self) -> None:
        self.inner.close()

    def _with_answer(self, seen: Observation | str) -> Observation:
        seen = validate_observation(seen, type(self.shown).__name__)
        answer = call_expert(self.expert, self.shown, rng=self.rng)
        return replace(seen, state_key=json.dumps([answer, seen.state_key]))


def with_expert(
    factory: Callable[[], TextEnvironment], expert: Callable[..., Answer], rows: Iterable[dict[str, Any]], seed: int
) -> tuple[Callable[[], ExpertEnvironment], list[dict[str, Any]]]:
    """Return the factory of an `ExpertEnvironment`, and its tasks."""
    seeded = ((row, derived_seed(seed, number)) for number, row in enumerate(rows))
    tasks = [{"task_id": task_id_of(row), "task": row, "seed": own} for row, own in seeded]
    return partial(ExpertEnvironment, factory, expert), tasks


def carried_answer(episode: Episode, rng: random.Random) -> Answer:
    """Return the answer that an `ExpertEnvironment` has put into the episode's observation, and remove it there."""
    answer, key = json.loads(episode.observation.state_key)
    episode.observation = replace(episode.observation, state_key=key)
    return answer


def agent_answer(expert: Callable[..., Answer], episode: Episode, rng: random.Random) -> Answer:
    """Return the answer of an agent's expert, a function of messages and tools."""
    request = episode.observation.request
    return call_expert(expert, request.messages, request.tools, rng=rng)


def expert_play(
    environment_factory: Callable,
    expert: Callable[..., Answer],
    tasks: Sequence[Mapping[str, Any]],
    limits: EpisodeLimits,
) -> tuple[Callable[[], TextEnvironment], list[dict[str, Any]], Callable[[Episode], str | ChatResponse | None]]:
    """Return what plays an expert without a model: the factory of workers, their rows, and an episode's answer."""
    rng, (factory, _, _) = random.Random(0), played_as(environment_factory, limits)
    if is_agent(environment_factory):
        choose, rows = partial(agent_answer, expert), [dict(task) for task in tasks]
    else:
        choose, (factory, rows) = carried_answer, with_expert(factory, expert, map(dict, tasks), 0)

    def answer(episode: Episode) -> str | ChatResponse | None:
        if (chosen := choose(episode, rng)) is None:
            return None
        message, in_text = as_message(chosen), episode.observation.request is None
        return prose(message) if in_text else ChatResponse(message["content"], tuple(message.get("tool_calls", ())))

    return factory, rows, answer


def call_expert(expert: Callable[..., Answer], *shown: Any, rng: random.Random) -> Answer:
    seeded = "rng" in inspect.signature(expert).parameters
    return expert(*shown, **({"rng": rng} if seeded else {}))


def recorded_answer(recorded: Sequence[Trajectory], episode: Episode, rng: random.Random) -> Answer:
    """Return the action that was recorded at the same turn; `recorded` are by the episode's number.

    `None` ends an episode whose record ends, or has a completion that is not well-formed, which is not to be taught.
    """
    step = next(iter(recorded[episode.number].steps[len(episode.steps) :]), None)
    if step is None or not step.valid:
        return None
    return step.action if step.response is None else step.response


def random_answer(episode: Episode, rng: random.Random) -> Answer:
    """Return a random admissible action, or a random call of an offered tool; an observation must list either."""
    seen = episode.observation
    if seen.request is not None and seen.request.tools:
        function = rng.choice(seen.request.tools)["function"]
        return {"name": function["name"], "arguments": random_arguments(function, rng)}
    remedy = "no actions and no tools are listed: write an expert"
    require(bool(seen.admissible_actions), "random_episodes", None, remedy)
    return rng.choice(seen.admissible_actions)


def as_message(answer: Any) -> Message:
    """Return an expert's answer as an assistant's message; `G2POError` if it is no text, calls or message."""
    if isinstance(answer, str):
        answer = {"content": answer}
    elif isinstance(answer, Mapping) and "name" in answer:
        answer = {"tool_calls": [answer]}
    elif isinstance(answer, Sequence):
        answer = {"tool_calls": answer}
    remedy = "return an action (a text), a call {'name': …, 'arguments': {…}}, a list of calls, a message, or None"
    require(isinstance(answer, Mapping), "expert", answer, remedy)
    return normalize_messages([{**answer, "role": "assistant"}])[0]


def prose(message: Message) -> str:
    """Return a message as text, with its calls as `<tool_call>…</tool_call>`."""
    return ProseTools().render([message], None)[0][0]["content"]


def find_expert(name: str) -> Callable[..., Answer] | None:
    """Return the function `expert` beside an environment or an agent, or in its class; `None` if there is neither."""
    module, _, attribute = name.rpartition(":")
    made = load(name)
    own = None if is_tool_environment(made) else getattr(made, "expert", None)  # there, a public method is a tool
    return getattr(import_named(module), "expert", own)
