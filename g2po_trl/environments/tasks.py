"""Dataset rows as tasks: their names, and whether they fit the environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.json import numbered_lines
from .validation import check_task_columns

if TYPE_CHECKING:
    from datasets import Dataset

# The one column of a `tasks_dataset`.
COLUMN = "g2po_task"


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
    for number, line in numbered_lines(text):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f'{path}, line {number}, is not valid JSON ({error}): write {{"seed": 1}}') from error
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {number}, is {line.strip()[:40]}: write an object, like {{"seed": 1}}')
        rows.append(row)
    return rows


def split_tasks(
    tasks: str | Path, eval_tasks: str | Path | None = None, num_eval_tasks: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tasks to train on and the held-out ones: those of `eval_tasks`, or the last lines of `tasks`.

    Args:
        num_eval_tasks: how many lines; `None`: a fifth.

    Raises:
        ValueError: when a file cannot be read, or there are none of a kind.
    """
    train = read_tasks(tasks)
    if eval_tasks is not None:
        held_out = read_tasks(eval_tasks)
    else:
        number = max(1, len(train) // 5) if num_eval_tasks is None else num_eval_tasks
        if not 0 < number < len(train):
            raise ValueError(
                f"num_eval_tasks is {number} and {tasks} has {len(train)} tasks: hold out at least 1 and leave at "
                "least 1, or pass --eval_tasks FILE"
            )
        train, held_out = train[:-number], train[-number:]
    for name, rows in ((tasks, train), (eval_tasks, held_out)):
        if not rows:
            raise ValueError(f"{name} has no tasks: write one a line, as JSON")
    return train, held_out


class _Absent:
    """Stands in a batch of rows for a column that a row does not have."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def tasks_dataset(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    """Return a `Dataset` whose rows reach `reset` as they are written here.

    `Dataset.from_list` stores rows as a table: columns that the first row lacks are dropped, missing ones are filled
    with `None`, nested dictionaries get each other's keys, an integer beside a float becomes a float. This one stores
    each row as JSON text and decodes it when it is read. Select and shuffle as usual; `map` the rows before.

    Args:
        rows: the tasks: keyword arguments of the environment's `reset`, as data that JSON has.

    Raises:
        ValueError: naming the first row that JSON does not give back.
    """
    from datasets import Dataset, Features, Value  # slow to import, and reading a tasks file needs none of it

    texts = [_as_text(row, number) for number, row in enumerate(rows, 1)]
    dataset = Dataset.from_dict({COLUMN: texts}, features=Features({COLUMN: Value("string")}))
    return dataset.with_transform(_decoded)


def _as_text(row: Mapping[str, Any], number: int) -> str:
    try:
        text = json.dumps(dict(row))
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {number} is not plain data ({error}): use texts, numbers, lists and dicts") from error
    if repr(json.loads(text)) != repr(dict(row)):  # tells 1 from 1.0 and True, and nan from null
        raise ValueError(
            f"task {number} would be read back as {text[:80]}: use lists for tuples, and texts as keys of dicts"
        )
    return text


def _decoded(batch: Mapping[str, list[str]]) -> dict[str, list[Any]]:
    """Rows as columns, as `datasets` wants them."""
    rows = [json.loads(text) for text in batch[COLUMN]]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, ABSENT) for row in rows] for name in names}
    return columns if columns or len(rows) == 1 else {COLUMN: [ABSENT] * len(rows)}


def own_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the columns that only other rows of its batch have."""
    return {name: value for name, value in row.items() if value is not ABSENT}


def task_id_of(task: Mapping[str, Any]) -> str:
    """The row's `task_id`, or a hash of its content where there is none."""
    if task.get("task_id") is not None:
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
        for where, columns in _columns_of(dataset).items():
            try:
                check_task_columns(environment_factory, columns)
            except ValueError as error:
                raise ValueError(f"{name} dataset{where}: {error}") from error


def _columns_of(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """Where each set of columns is found first: one for all rows of a table, those of each row in `tasks_dataset`."""
    if COLUMN not in dataset.column_names:
        return {"": tuple(dataset.column_names)}
    first: dict[tuple[str, ...], str] = {}
    for number, row in enumerate(dataset, 1):
        first.setdefault(tuple(sorted(own_columns(row))), f", row {number}")
    return {where: columns for columns, where in first.items()}
