"""What a training run plays: environments as workers construct them, the wording of prompts, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contract import Observation, TextEnvironment
from .episode_limits import EpisodeLimits
from .failures import describe_failure
from .pool.pool import EnvironmentFailure, EnvironmentPool
from .several import check_limits, one_task_each, weighted
from .tasks import check_datasets, plain
from .tools.trl_rewards import check_reward_columns
from .tools.trl_tools import played_as
from .validation import EnvironmentContractError

if TYPE_CHECKING:
    from datasets import Dataset

    from ..prompts.template import PromptTemplate


@dataclass(frozen=True)
class Setup:
    """The half of a training run that needs no model.

    Args:
        factory: constructs the environments of workers; tool-based classes are wrapped.
        prompt_template: wording of prompts.
        history: `"window"` or `"conversation"`. `None`: with several environments, the history of each.
        train_dataset: the tasks, each as often as its weight says.
        eval_dataset: an evaluation set, or several by name.
        first_tasks: the first task of each environment.
    """

    factory: Callable[[], TextEnvironment]
    prompt_template: PromptTemplate
    history: str | None
    train_dataset: Dataset
    eval_dataset: Dataset | dict[str, Dataset] | None
    first_tasks: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        environment_factory: Callable,
        limits: EpisodeLimits,
        prompt_template: Any,
        history: str | None,
        train_dataset: Dataset,
        eval_dataset: Dataset | dict[str, Dataset] | None,
    ) -> Setup:
        """Return the setup of a trainer's arguments. Raises `G2POError` if they do not fit each other."""
        check_limits(limits, environment_factory)
        factory, prompt_template, history = played_as(environment_factory, limits, prompt_template, history)
        train_dataset, eval_dataset = plain(train_dataset), plain(eval_dataset)
        check_datasets(factory, train_dataset, eval_dataset)
        train_dataset = weighted(environment_factory, train_dataset)
        first_tasks = one_task_each(environment_factory, train_dataset)
        for task in first_tasks:
            check_reward_columns(environment_factory, task)
        return cls(factory, prompt_template, history, train_dataset, eval_dataset, first_tasks)


def check_start(pool: EnvironmentPool, tasks: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Return the first observations of tasks, after an admissible step in each, for the start of training.

    Raises:
        EnvironmentContractError: if reset or step fails.
    """
    starts, failures = first_steps(pool, tasks)
    for failure in failures:
        raise EnvironmentContractError(f"{pool.name} {describe_failure(failure)}")
    return starts


def first_steps(
    pool: EnvironmentPool, tasks: Sequence[Mapping[str, Any]], invalid: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[Observation | EnvironmentFailure], list[EnvironmentFailure]]:
    """Return the first observations of tasks, and the failures of resets and of a first step.

    The step is an admissible action for `tasks`, and an inadmissible one for the tasks in `invalid`.
    """
    starts = pool.reset([*tasks, *invalid])
    running = [slot for slot, result in enumerate(starts) if not isinstance(result, EnvironmentFailure)]
    actions = {slot: (starts[slot].admissible_actions or ["look"])[0] for slot in running}
    actions |= {slot: "no such action" for slot in running if slot >= len(tasks)}
    results = [*starts, *pool.step(actions).values()]
    pool.end()
    return starts[: len(tasks)], [result for result in results if isinstance(result, EnvironmentFailure)]
