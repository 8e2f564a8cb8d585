"""Dataset rows as tasks: their names, their groups, and whether they fit the environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..credit.graph import TrajectoryRecord
from ..rollout.prompting import DEFAULT_PROMPT, PromptTemplate
from .checks import check_task_columns
from .contract import TextEnvironment


@dataclass(frozen=True)
class Panel:
    """A fixed set of tasks, and how they are played.

    Args:
        name: for tables. rows: the tasks. environment_factory: plays them.
        prompt_template, max_turns, history_length: of a trained agent, as its recipe sets them.
        about, action_form: for prompting agents: what the environment is and what can be done in it, and how an action
            is written.
        multiline, lower_case: for the same: whether an action may have several lines, and whether it is played in
            lower case (else as listed, regardless of case, or as written).
        columns: the row of the paper's table: heading -> what `g2po_trl.runs.evaluation.summarize` calls it; a kind
            of task as "success_rate_by_type/<kind>".
        data: what the tasks are made of, e.g. a hash of their files: part of what numbers belong to.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    environment_factory: Callable[[], TextEnvironment]
    prompt_template: PromptTemplate = DEFAULT_PROMPT
    max_turns: int = 30
    history_length: int = 2
    about: str = "You act in an environment that answers in text."
    action_form: str = "the action, exactly as listed"
    multiline: bool = False
    lower_case: bool = False
    columns: Mapping[str, str] = field(default_factory=lambda: {"Succ.": "success_rate"})
    data: str = ""


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """A file with one task a line, as JSON.

    Raises:
        ValueError: naming the file, and the line that is no task.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"tasks is {str(path)!r}, which cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f'{path}, line {number}, is not valid JSON ({error}): write {{"seed": 1}}') from error
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {number}, is {line.strip()[:40]}: write an object, like {{"seed": 1}}')
        rows.append(row)
    return rows


def task_id_of(task: dict[str, Any]) -> str:
    """The row's `task_id`, or a hash of its content."""
    if "task_id" in task:
        return str(task["task_id"])
    content = json.dumps(task, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def tasks_hash(tasks: Iterable[dict[str, Any]]) -> str:
    """A short name for a list of tasks: equal for the same tasks in any order, and for nothing else."""
    names = sorted({task_id_of(task) for task in tasks})
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def groups_of(records: Sequence[TrajectoryRecord], num_generations: int) -> list[Sequence[TrajectoryRecord]]:
    """The groups of a rollout's records, gathered over all ranks: `num_generations` in a row.

    Raises:
        RuntimeError: when a group would hold several tasks.
    """
    groups = [records[i : i + num_generations] for i in range(0, len(records), num_generations)]
    for group in groups:
        if len({r.task_id for r in group}) != 1:
            raise RuntimeError(
                f"a group holds the tasks {sorted({r.task_id for r in group})}: the rows of a batch did not arrive as "
                f"num_generations={num_generations} copies of one task. Does the dataset repeat a row?"
            )
    return groups


def check_datasets(environment_factory, train_dataset, eval_dataset) -> None:
    """Do the datasets have one row a task, with the columns `reset` needs?

    Raises:
        ValueError: when they do not.
    """
    from datasets import Dataset, IterableDataset  # slow to import, and reading a tasks file needs none of it

    if not isinstance(train_dataset, Dataset) or len(train_dataset) == 0:
        if isinstance(train_dataset, IterableDataset):
            raise ValueError("train_dataset is an IterableDataset: tasks are repeated in groups, pass a Dataset")
        raise ValueError(f"train_dataset is {train_dataset!r}: pass a Dataset with one row a task")
    panels = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in {"train": train_dataset, **panels}.items():
        if dataset is None:
            continue
        try:
            check_task_columns(environment_factory, dataset.column_names)
        except ValueError as error:
            raise ValueError(f"{name} dataset: {error}") from error
