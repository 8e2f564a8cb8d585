"""Tasks as dataset rows: reading, splitting, identifying and validating them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import G2POError
from ..utils.json import json_values
from ..utils.options import require
from ..utils.show import show
from .several import environments_of, player_of
from .validation import check_call, unwrap_factory

if TYPE_CHECKING:
    from datasets import Dataset

COLUMN = "g2po_task"  # the one of a `tasks_dataset`


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """Return the tasks of a file, one JSON object per line or an array. Raises `G2POError`, naming file and line."""
    try:
        rows = list(json_values(path))
    except OSError as error:
        raise G2POError(f"tasks is {str(path)!r}, which cannot be read: {error}", "tasks", path) from error
    for number, row in rows:
        if not isinstance(row, dict):
            what = f"{path}, line {number}, is {show(row)}"
            raise G2POError(f'{what}: write an object, like {{"seed": 1}}', "tasks", row)
    require(bool(rows), "tasks", str(path), "the file is empty; write one task per line")
    return [row for _, row in rows]


def split_tasks(
    tasks: str | Path, eval_tasks: str | Path | None = None, num_eval_tasks: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and the held-out tasks: those in `eval_tasks`, else the last lines of `tasks` (20 %)."""
    train = read_tasks(tasks)
    if eval_tasks is not None:
        return train, read_tasks(eval_tasks)
    number = max(1, len(train) // 5) if num_eval_tasks is None else num_eval_tasks
    remedy = f"{tasks} has {len(train)} tasks; hold out at least 1 and leave at least 1, or pass --eval-tasks FILE"
    require(0 < number < len(train), "num_eval_tasks", number, remedy)
    return train[:-number], train[-number:]


def tasks_dataset(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    """Return a `Dataset` that passes rows to `reset` unchanged.

    `Dataset.from_list` stores rows as a table: it drops columns that the first row lacks, fills missing values with
    `None`, merges the keys of nested dictionaries, and converts integers to floats in mixed columns. This dataset
    stores each row as JSON text and decodes it on access. Select and shuffle as usual; `map` the rows before.

    Args:
        rows: keyword arguments of the environment's `reset`, as plain JSON data.

    Raises:
        G2POError: for the first row that JSON does not preserve.
    """
    from datasets import Dataset, Features, Value  # slow to import, and not needed to read a tasks file

    rows = [dict(row) for row in rows]
    texts = [json.dumps(row, default=repr, skipkeys=True) for row in rows]
    for number, (row, text) in enumerate(zip(rows, texts), 1):
        remedy = "JSON does not give it back; use strings, numbers, lists, and dicts with strings as keys"
        require(repr(json.loads(text)) == repr(row), f"task {number}", row, remedy)  # 1, 1.0 and True differ
    return Dataset.from_dict({COLUMN: texts}, features=Features({COLUMN: Value("string")})).with_transform(_decoded)


def _decoded(batch: Mapping[str, list[str]]) -> dict[str, list[Any]]:
    """Return one row as its columns; several, which may lack some, also as their texts, for `decoded`."""
    rows = [json.loads(text) for text in batch[COLUMN]]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return columns if len(rows) == 1 else {**batch, **columns}


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a batch as the row of the dataset."""
    return json.loads(row[COLUMN]) if COLUMN in row else dict(row)


def task_id_of(task: Mapping[str, Any]) -> str:
    """Return the row's `task_id`, or a hash of its content if it has none."""
    if task.get("task_id") is not None:
        return str(task["task_id"])
    content = json.dumps(task, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def tasks_hash(tasks: Iterable[dict[str, Any]]) -> str:
    """Return a hash of a list of tasks that is independent of their order."""
    names = sorted(json.dumps(task, sort_keys=True, default=str) for task in tasks)
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def panels_of(eval_dataset: Dataset | Mapping[str, Dataset] | None) -> dict[str, Dataset]:
    """Return evaluation sets by name; one without a name is "eval"."""
    panels = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return {name: dataset for name, dataset in panels.items() if dataset is not None}


def check_rows(environment_factory, name: str, dataset) -> None:
    """Refuse what is not a `Dataset` with rows, and rows that `reset` does not accept or that change when read."""
    from datasets import Dataset  # slow to import, and not needed to read a tasks file

    is_dataset = isinstance(dataset, Dataset) and len(dataset) > 0
    is_written = is_dataset and dataset.format["format_kwargs"].get("transform") is _decoded  # by `tasks_dataset`
    fits = is_written or is_dataset and dataset.format["type"] is None and COLUMN not in dataset.column_names
    remedy = "pass a Dataset with one row per task, e.g. tasks_dataset([{'seed': 1}]), or a table.with_format(None)"
    require(fits, f"{name}_dataset", dataset, remedy)
    are_alike = not is_written and not environments_of(environment_factory)
    for number, row in enumerate(dataset.select([0]) if are_alike else dataset, 1):
        check_task_columns(environment_factory, row, f"{name} dataset, row {number}: ")
    remedy = "its text differs each time it is read, so rows cannot be told apart; store a number or a path"
    row, again = dataset[0], dataset[0]
    for column, value in row.items():
        require(task_id_of({column: value}) == task_id_of({column: again[column]}), column, value, remedy)


def check_task_columns(environment_factory: Callable, task: Mapping[str, Any], where: str = "") -> None:
    """Refuse (`G2POError`) a parameter of `reset` without a column, and a column that `reset` does not accept."""
    environment_factory, task = player_of(environment_factory, task)
    made = unwrap_factory(environment_factory)
    if inspect.isclass(made):  # a plain function constructs the environment: it is unknown before a call
        name, remedy = f"{made.__name__}.reset", "add or rename a column, or add **columns to reset's arguments"
        check_call(made.reset, name, task, f"{where}{name}", remedy, None)
