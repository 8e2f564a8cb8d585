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
from .several import PromptTemplates, check_limits, environments_of, mixed, one_task_each
from .tasks import check_datasets, plain
from .tools.trl_rewards import bound_environment, check_reward_columns
from .tools.trl_tools import is_tool_environment, tool_environment_factory
from .validation import EnvironmentContractError, unwrap_factory


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
        self.train_dataset, self.eval_dataset = plain(train_dataset), plain(eval_dataset)
        check_datasets(self.factory, self.train_dataset, self.eval_dataset)
        self.first_tasks = one_task_each(environment_factory, self.train_dataset)
        for task in self.first_tasks:
            check_reward_columns(environment_factory, task)


def played_as(
    environment_factory: Callable, limits: EpisodeLimits, prompt_template: Any = None, history: str | None = None
) -> tuple[Callable[[], TextEnvironment], PromptTemplate, str | None]:
    """Return the factory, the wording of prompts and the history of an environment, from the trainer's arguments.

    Tools are described in prose (`"window"`) or by the chat template (`"conversation"`).
    """
    template = prompt_template_of(environment_factory, prompt_template)
    history = history or default_history(environment_factory, template)
    if environments := environments_of(environment_factory):
        given = {name: (limits.by(name), template.of(name), history) for name in environments}
        played = {name: played_as(one, *given[name])[0] for name, one in environments.items()}
        return mixed(played), template, history
    if taken := getattr(unwrap_factory(environment_factory), "takes_limits", ()):
        environment_factory = partial(environment_factory, **{name: getattr(limits, name) for name in taken})
    elif is_tool_environment(environment_factory):
        environment_factory = tool_environment_factory(environment_factory, limits.max_turns, history == "window")
    return environment_factory, template, history


def text_environment_factory(
    environment_factory: Callable, limits: EpisodeLimits, history: str | None = "window", prompt_template: Any = None
) -> Callable[[], TextEnvironment]:
    """Return a factory of `TextEnvironment`s with these limits, as `played_as`."""
    return played_as(environment_factory, limits, prompt_template, history)[0]


def default_history(environment_factory: Callable, prompt_template: PromptTemplate | None) -> str | None:
    """Return `"conversation"` for a tool-based class without a wording of its own; `None` for several environments."""
    if environments_of(environment_factory):
        return None
    worded = prompt_template_of(environment_factory, prompt_template) != TOOL_PROMPT
    return "conversation" if is_tool_environment(environment_factory) and not worded else "window"


def prompt_template_of(environment_factory: Callable, given: Any = None) -> PromptTemplate:
    """Return the given wording of prompts, of some environments by name, or of all; else the class's, or a default."""
    environments = environments_of(environment_factory)
    if environments and not isinstance(given, PromptTemplates):
        named = given if isinstance(given, Mapping) else dict.fromkeys(environments, given)
        remedy = f"the environments of this run are {', '.join(environments)}"
        require(named.keys() <= environments.keys(), "prompt_template", given, remedy)
        templates = {name: prompt_template_of(one, named.get(name)) for name, one in environments.items()}
        return PromptTemplates(**vars(next(iter(templates.values()))), by_environment=templates)
    made, _ = bound_environment(environment_factory)
    own = getattr(made, "prompt_template", None) if isinstance(made, type) else None
    default = TOOL_PROMPT if is_tool_environment(environment_factory) else DEFAULT_PROMPT
    template = next(one for one in (given, own, default) if one is not None)
    require(isinstance(template, PromptTemplate), "prompt_template", template, "set it to a PromptTemplate")
    return template


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
