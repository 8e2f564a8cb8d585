"""What a training run plays: environments as workers construct them, the wording of prompts, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..prompts.template import DEFAULT_PROMPT, PromptTemplate
from ..prompts.tool_calls import TOOL_PROMPT
from ..utils.options import require
from .causes import describe_failure
from .contract import Observation, TextEnvironment
from .episode_limits import EpisodeLimits
from .loading import load, resolve_agent_name
from .pool.pool import EnvironmentFailure, EnvironmentPool
from .several import PromptTemplates, check_limits, check_mixture, environments_of, mixed, one_task_each
from .tasks import check_rows, panels_of
from .tools.trl_rewards import bound_environment, check_reward_columns
from .tools.trl_tools import is_tool_environment, tool_environment_factory
from .validation import EnvironmentContractError


class Setup:
    """The half of a training run that needs no model. Raises `G2POError` if arguments do not fit each other.

    `factory` makes the environments of workers; `first_tasks` are the first of each; several have each its `history`.
    """

    def __init__(
        self, environment_factory, limits: EpisodeLimits, prompt_template, history, train_dataset, eval_dataset
    ):
        check_limits(limits, environment_factory)
        playing = played_as(environment_factory, limits, prompt_template, history)
        self.factory, self.prompt_template, self.history = playing
        datasets = {"train": train_dataset, **panels_of(eval_dataset)}
        for name, dataset in datasets.items():
            check_rows(self.factory, name, dataset)
        check_mixture(self.factory, datasets)
        self.first_tasks = one_task_each(environment_factory, train_dataset)
        for task in self.first_tasks:
            check_reward_columns(environment_factory, task)


def played_as(
    environment_factory: Callable, limits: EpisodeLimits, prompt_template: Any = None, history: str | None = None
) -> tuple[Callable[[], TextEnvironment], PromptTemplate, str | None]:
    """Return the factory, the wording of prompts and the history of an environment, from the trainer's arguments.

    The wording is the given one, of some environments by name or of all, else the class's, or a default. Tools are
    described in prose (`"window"`) or by the chat template (`"conversation"`, the default without another wording).
    With several environments, the history is the given one: each has its own.
    """
    if environments := environments_of(environment_factory):
        given = getattr(prompt_template, "by_environment", prompt_template)
        given = given if isinstance(given, Mapping) else dict.fromkeys(environments, given)
        remedy = f"the environments of this run are {', '.join(environments)}"
        require(given.keys() <= environments.keys(), "prompt_template", given, remedy)
        played = {n: played_as(one, limits.by(n), given.get(n), history) for n, one in environments.items()}
        templates = {name: template for name, (_, template, _) in played.items()}
        template = PromptTemplates(**vars(next(iter(templates.values()))), by_environment=templates)
        return mixed({name: factory for name, (factory, _, _) in played.items()}), template, history
    made, _ = bound_environment(environment_factory)
    has_tools, own = is_tool_environment(environment_factory), getattr(made, "prompt_template", None)
    default = TOOL_PROMPT if has_tools else DEFAULT_PROMPT
    template = next(one for one in (prompt_template, own, default) if one is not None)
    require(isinstance(template, PromptTemplate), "prompt_template", template, "set it to a PromptTemplate")
    history = history or ("conversation" if has_tools and template == TOOL_PROMPT else "window")
    if taken := getattr(made, "takes_limits", ()):
        environment_factory = partial(environment_factory, **{name: getattr(limits, name) for name in taken})
    elif has_tools:
        environment_factory = tool_environment_factory(environment_factory, limits.max_turns, history == "window")
    return environment_factory, template, history


def check_start(pool: EnvironmentPool, tasks: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Return the first observations of tasks, each after a step. Raises `EnvironmentContractError` if one fails."""
    starts, failures = first_steps(pool, tasks)
    if failures:
        raise EnvironmentContractError(f"{pool.name} {describe_failure(failures[0])}")
    return starts


def first_steps(
    pool: EnvironmentPool, tasks: Sequence[Mapping[str, Any]], invalid: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[Observation | EnvironmentFailure], list[EnvironmentFailure]]:
    """Return the first observations of tasks, and the failures of resets and of a first step.

    The step is an admissible action for `tasks`, and an inadmissible one for the tasks in `invalid`.
    """
    starts = pool.reset([*tasks, *invalid])
    running = {slot: start for slot, start in enumerate(starts) if not isinstance(start, EnvironmentFailure)}
    actions = {slot: (start.admissible_actions or ["look"])[0] for slot, start in running.items()}
    actions |= {slot: "no such action" for slot in running if slot >= len(tasks)}
    results = [*starts, *pool.step(actions).values()]
    pool.end()
    return starts[: len(tasks)], [result for result in results if isinstance(result, EnvironmentFailure)]


def agent_factory(
    agent: Callable | str | Mapping, max_turns: int, state_key: Callable | None = None, environment_factory: Any = None
) -> Callable[[], TextEnvironment]:
    """Return the environment factory of an agent, a function or the name of one.

    `environment_factory` is `None`, unless both are dictionaries, whose agents and environments one run plays.
    """
    if isinstance(agent, str):  # the name of one stays a name: workers may run in another folder
        agent = resolve_agent_name(agent)
        agent = named if isinstance(named := load(agent), Mapping) else agent
    environments = environment_factory or {}
    if isinstance(agent, Mapping) and isinstance(environments, Mapping):
        both = sorted(agent.keys() & environments.keys())
        require(not both, "agent", both, "environment_factory has the same names: give each its own")
        agents = {name: agent_factory(one, max_turns, state_key) for name, one in agent.items()}
        return mixed(agents | dict(environments))
    remedy = "an agent brings its own environment: pass one of them, or a dictionary of each"
    require(environment_factory is None, "environment_factory", environment_factory, remedy)
    remedy = "pass a function agent(task, client), an AgentCommand, or file.py:NAME"
    require(callable(agent) or isinstance(agent, str), "agent", agent, remedy)
    keyed = {} if state_key is None else {"state_key": state_key}
    return partial(load("g2po_trl:AgentEnvironment"), agent=agent, max_turns=max_turns, **keyed)
