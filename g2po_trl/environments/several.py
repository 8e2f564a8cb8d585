"""Several environments in one run: the column `environment` of a task names the one that plays it, as in TRL.

    G2POTrainer(environment_factory={"lamp": LampEnvironment, "shop": ShopEnvironment}, …)
    tasks_dataset([{"environment": "lamp", "seed": 1}, {"environment": "shop", "goal": "a red mug", "weight": 2}])

Each environment has its own tools, prompt template, columns and limits. A group plays one task, so groups and their
state graphs never mix environments. Agents are environments, too (`agent={"coder": …, "browser": …}`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ..prompts.template import PromptTemplate
from ..utils.errors import G2POError
from ..utils.options import is_of_kind, require
from .contract import Observation, StepResult, TextEnvironment
from .episode_limits import EpisodeLimits
from .validation import EnvironmentContractError, unwrap_factory

if TYPE_CHECKING:
    from datasets import Dataset

# Columns of tasks that are not passed to `reset`: which environment plays it, and how often it is played.
COLUMN, WEIGHT = "environment", "weight"


@dataclass(frozen=True)
class PromptTemplates(PromptTemplate):
    """The templates of several environments, by name; the other fields are those of the first one."""

    by_environment: Mapping[str, PromptTemplate] = field(default_factory=dict)

    @classmethod
    def of_environments(cls, templates: Mapping[str, PromptTemplate]) -> PromptTemplates:
        """Return the templates as one."""
        first = next(iter(templates.values()))
        return cls(**{one.name: getattr(first, one.name) for one in fields(PromptTemplate)}, by_environment=templates)

    def of(self, environment: str | None) -> PromptTemplate:
        return self.by_environment[environment]


class MixedEnvironment(TextEnvironment):
    """Plays each task with the environment that its column `environment` names.

    Args:
        environments: factories of environments, by name.
    """

    def __init__(self, environments: Mapping[str, Callable[[], TextEnvironment]]):
        self.factories = environments
        self._made: dict[str, TextEnvironment] = {}
        self._playing: TextEnvironment | None = None

    def reset(self, /, **task) -> Observation | str:
        """Start a task, without the columns `environment` and `weight`. Raises `G2POError` for an unknown name."""
        name = name_in(self.factories, task)
        if name not in self._made:
            self._made[name] = made = self.factories[name]()
            if not callable(getattr(made, "step", None)):
                raise EnvironmentContractError(
                    f"environment {name!r} is a {type(made).__name__} without a step: add one"
                )
        self._playing = self._made[name]
        seen = self._playing.reset(**_row_of(getattr(self._playing, "inner", None) or self._playing, task))
        if (rewarded := getattr(self._playing, "rewarded", None)) is not None:
            rewarded.take_columns(task)
        return seen

    def step(self, action: str) -> StepResult:
        return self._playing.step(action)

    def close(self) -> None:
        for environment in self._made.values():
            environment.close()

    def _end_episode(self) -> None:
        if (end := getattr(self._playing, "_end_episode", None)) is not None:
            end()

    def _worker_is_unusable(self) -> bool:
        asked = (getattr(one, "_worker_is_unusable", None) for one in self._made.values())
        return any(ask() for ask in asked if ask is not None)

    @staticmethod
    def player_of_task(environment_factory: partial, task: Mapping[str, Any]) -> tuple[Callable, dict[str, Any]]:
        """Return the factory of the environment that plays a task, and the arguments of its `reset`."""
        environments = environments_of(environment_factory)
        chosen = environments[name_in(environments, task)]
        return chosen, _row_of(unwrap_factory(chosen), task)


def mixed(environment_factory: Any) -> Any:
    """Return the factory of a `MixedEnvironment` for a dictionary of factories; any other value is unchanged.

    Raises:
        G2POError: for an empty dictionary, a name that is not a string, or a value that is not callable.
    """
    if not isinstance(environment_factory, Mapping):
        return environment_factory
    if not environment_factory:
        raise G2POError("environment_factory is {}: give at least one environment, by its name")
    for name, made in environment_factory.items():
        if not isinstance(name, str) or not name.strip() or "/" in name:
            raise G2POError(f"environment_factory has the name {name!r}: use a string without /, as metrics need")
        if isinstance(made, TextEnvironment) or not callable(made):
            raise G2POError(f"environment_factory[{name!r}] is {made!r}: pass a class or functools.partial(CLASS, …)")
    return partial(MixedEnvironment, environments=dict(environment_factory))


def environments_of(environment_factory: Any) -> dict[str, Callable]:
    """Return the environments of a run with several, by name; for any other factory an empty dictionary."""
    if unwrap_factory(environment_factory) is not MixedEnvironment:
        return {}
    return environment_factory.keywords["environments"]


def check_limits(limits: EpisodeLimits, environment_factory: Any) -> None:
    """Refuse (`G2POError`) limits of unknown environments, and limits of requests in a run without agents."""
    environments = environments_of(environment_factory)
    limits.check_names(environments)
    made = map(unwrap_factory, environments.values() or [environment_factory])
    has_agent = any("max_requests" in getattr(one, "takes_limits", ()) for one in made)
    remedy = "only agents send requests; leave it out, or set max_turns"
    require(has_agent or limits.max_requests is None, "max_requests", limits.max_requests, remedy)


def for_each(environment_factory: Callable, change: Callable[[str, Callable], Callable]) -> Callable:
    """Return the factory of several environments with each of them changed: name and factory -> factory."""
    changed = {name: change(name, one) for name, one in environments_of(environment_factory).items()}
    return partial(MixedEnvironment, environments=changed)


def name_in(environments: Iterable[str], task: Mapping[str, Any]) -> str:
    """Return the environment's name in a task. Raises `G2POError` if it is missing or unknown."""
    name = task.get(COLUMN)
    if not isinstance(name, str) or name not in environments:
        raise G2POError(f"the column {COLUMN} is {name!r} in a task: set it to one of {', '.join(environments)}")
    return name


def one_task_each(environment_factory: Callable, tasks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first task of each environment; of a single environment, the first task."""
    names = set(environments_of(environment_factory)) or {None}
    found: dict[str | None, dict[str, Any]] = {}
    for task in tasks:
        found.setdefault(task.get(COLUMN) if names != {None} else None, task)
        if found.keys() >= names:
            break
    return list(found.values())


def check_mixture(environment_factory: Callable, datasets: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Refuse (`G2POError`) tasks without a known environment, an unused environment, and a `task_id` of two.

    Args:
        environment_factory: of several environments; nothing is checked for another one.
        datasets: tasks by the name of their dataset.
    """
    environments = environments_of(environment_factory)
    owners: dict[str, str] = {}
    used = set()
    for dataset, tasks in datasets.items() if environments else ():
        for number, task in enumerate(tasks, 1):
            try:
                name = name_in(environments, task)
            except G2POError as error:
                raise G2POError(f"{dataset} dataset, row {number}: {error}") from error
            used.add(name)
            task_id = task.get("task_id")
            owner = name if task_id is None else owners.setdefault(str(task_id), name)
            if owner != name:
                raise G2POError(
                    f"task_id is {task_id!r} in {owner} and in {name} ({dataset} dataset, row {number}): give tasks "
                    f"of different environments different names, such as '{name}/{task_id}'"
                )
    if unused := [name for name in environments if name not in used]:
        raise G2POError(
            f"environment_factory has {unused[0]!r}, which is the {COLUMN} of no task: add tasks, or leave it out"
        )


def weighted(environment_factory: Callable, dataset: Dataset) -> Dataset:
    """Return the tasks of several environments with each repeated as often as its column `weight` asks for.

    Raises:
        G2POError: for a weight that is not a whole number of at least 1.
    """
    if not environments_of(environment_factory):
        return dataset
    places: list[int] = []
    for place, task in enumerate(dataset):
        weight = 1 if task.get(WEIGHT) is None else task[WEIGHT]
        if not is_of_kind(weight, int) or weight < 1:
            raise G2POError(
                f"{WEIGHT} is {weight!r} in row {place + 1} of the train dataset: set it to a whole number of at "
                "least 1, the number of times that an epoch plays the task"
            )
        places += [place] * weight
    return dataset if len(places) == len(dataset) else dataset.select(places)


def _row_of(environment: Any, task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a task for an environment, which may be a class: in tables, it has those of others too.

    These have no value (`None`), and are passed only to a `reset` that names them.
    """
    reset = getattr(environment, "reset", None)
    parameters = inspect.signature(reset).parameters.values() if reset is not None else ()
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    own = {name: value for name, value in task.items() if name not in (COLUMN, WEIGHT)}
    return {name: value for name, value in own.items() if value is not None or name in named}
