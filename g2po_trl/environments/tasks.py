"""Dataset rows as tasks: their names, and whether they fit the environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..json_text import json_lines
from .checks import check_task_columns


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """A file with one task a line, as JSON.

    Raises:
        ValueError: naming the file, and the line that is no task.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"tasks is {str(path)!r}, which cannot be read: {error}") from error
    rows = []
    for number, line in json_lines(text):
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
    """A short name for a list of tasks: equal for the same rows in any order, and for nothing else."""
    names = sorted(json.dumps(task, sort_keys=True, default=str) for task in tasks)
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


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
