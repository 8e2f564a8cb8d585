"""Several environments in one run: the column `environment` of a task names the one that plays it, as in TRL.

    G2POTrainer(environment_factory={"lamp": LampEnvironment, "shop": ShopEnvironment}, …)
    tasks_dataset([{"environment": "lamp", "seed": 1}, {"environment": "shop", "goal": "a red mug"}])

Each environment has its own tools, prompt template, columns and limits. Groups never mix environments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

from ..prompts.template import PromptTemplate
from ..utils.options import require
from .contract import Observation, StepResult, TextEnvironment
from .episode_limits import EpisodeLimits
from .validation import constructed, is_agent, unwrap_factory

COLUMN = "environment"  # of a task; no `reset` gets it


@dataclass(frozen=True)
class PromptTemplates(PromptTemplate):
    """The templates of several environments, by name; the other fields are those of the first one."""

    by_environment: Mapping[str, PromptTemplate] = field(default_factory=dict)

    def of(self, environment: str | None) -> PromptTemplate:
        return self.by_environment[environment]


class MixedEnvironment(TextEnvironment):
    """Plays each task with the environment that its column `environment` names, of factories by name."""

    def __init__(self, environments: Mapping[str, Callable[[], TextEnvironment]]):
        self.factories = environments
        self._made: dict[str, TextEnvironment] = {}
        self._playing: TextEnvironment | None = None

    def reset(self, /, **task) -> Observation | str:
        """Start a task, without the column `environment`. Raises `G2POError` for an unknown name."""
        name = name_in(self.factories, task)
        if name not in self._made:
            self._made[name] = constructed(self.factories[name], f"environment {name!r}")
        self._playing = self._made[name]
        start = getattr(self._playing, "reset_row", None)  # of tools, whose reward functions get all columns
        return self._playing.reset(**row_of(self._playing, task)) if start is None else start(task)

    def step(self, action: str) -> StepResult:
        return self._playing.step(action)

    def close(self) -> None:
        for environment in self._made.values():
            environment.close()

    def end_episode(self) -> None:
        self._playing.end_episode()

    def needs_new_worker(self) -> bool:
        return any(isinstance(one, TextEnvironment) and one.needs_new_worker() for one in self._made.values())


def mixed(environment_factory: Any) -> Any:
    """Return the factory of a `MixedEnvironment` for a dictionary of factories; any other value is unchanged."""
    if not isinstance(environment_factory, Mapping):
        return environment_factory
    require(environment_factory != {}, "environment_factory", {}, "give at least one environment, by its name")
    for name, made in environment_factory.items():
        is_name = isinstance(name, str) and name.strip() and "/" not in name  # names are parts of metrics
        fits = is_name and callable(made) and not isinstance(made, TextEnvironment)
        remedy = "pass a class or functools.partial(CLASS, …), under a name without /"
        require(fits, f"environment_factory[{name!r}]", made, remedy)
    return partial(MixedEnvironment, environments=dict(environment_factory))


def environments_of(environment_factory: Any) -> dict[str, Callable]:
    """Return the environments of a run with several, by name; for any other factory an empty dictionary."""
    is_mixed = getattr(environment_factory, "func", None) is MixedEnvironment
    return environment_factory.keywords["environments"] if is_mixed else {}


def player_of(environment_factory: Callable, task: Mapping[str, Any]) -> tuple[Callable, Mapping[str, Any]]:
    """Return the factory of the environment that plays a task, and the arguments of its `reset`."""
    if environments := environments_of(environment_factory):
        environment_factory = environments[name_in(environments, task)]
        task = row_of(unwrap_factory(environment_factory), task)
    return environment_factory, task


def row_of(environment: Any, task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's columns for an environment or its class, without value only those that its `reset` names."""
    named = inspect.signature(environment.reset).parameters if hasattr(environment, "reset") else ()
    return {name: value for name, value in task.items() if name != COLUMN and (value is not None or name in named)}


def name_in(environments: Iterable[str], task: Mapping[str, Any]) -> str:
    """Return the environment's name in a task. Raises `G2POError` if it is missing or unknown."""
    name = task.get(COLUMN)
    require(name in list(environments), COLUMN, name, f"set the column of a task to one of {', '.join(environments)}")
    return name


def one_task_each(environment_factory: Callable, tasks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first task of each environment; of a single environment, the first task."""
    first: dict[str, dict[str, Any]] = {}
    for task in tasks if environments_of(environment_factory) else islice(tasks, 1):
        first.setdefault(task.get(COLUMN), task)
    return list(first.values())


def check_limits(limits: EpisodeLimits, environment_factory: Any) -> None:
    """Refuse (`G2POError`) limits of unknown environments, and limits of requests in a run without agents."""
    environments = environments_of(environment_factory)
    for name, given in (limits.environment_limits or {}).items():
        remedy = f"the environments of this run are {', '.join(environments) or 'a single one, without a name'}"
        require(name in environments, f"environment_limits[{name!r}]", given, remedy)
    has_agent = any(map(is_agent, environments.values() or [environment_factory]))
    remedy = "only agents send requests; leave it out, or set max_turns"
    require(has_agent or limits.max_requests is None, "max_requests", limits.max_requests, remedy)


def check_mixture(environment_factory: Callable, datasets: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Refuse (`G2POError`) tasks without a known environment, an unused environment, and a `task_id` of two."""
    environments, owners, used = environments_of(environment_factory), {}, set()
    for task in chain.from_iterable(datasets.values()) if environments else ():
        name, task_id = name_in(environments, task), task.get("task_id")
        used.add(name)
        is_own = task_id is None or owners.setdefault(str(task_id), name) == name
        require(is_own, "task_id", task_id, f"two environments have it; write '{name}/{task_id}'")
    unused = sorted(environments.keys() - used)
    require(not unused, "environment_factory", unused, f"no task has these in its column {COLUMN}: leave them out")
