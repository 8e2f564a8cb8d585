"""What a training run plays: environments as workers construct them, the wording of prompts, and tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .adapters.mixed import check_limits, one_task_each, weighted
from .adapters.trl_rewards import check_reward_columns
from .adapters.trl_tools import played_as
from .contract import TextEnvironment
from .episode_limits import EpisodeLimits
from .tasks import check_datasets, plain

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
