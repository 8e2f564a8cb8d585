"""Tasks as dataset rows: reading, splitting, identifying and validating them."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import G2POError
from ..utils.json import json_values
from ..utils.show import show
from .several import COLUMN as ENVIRONMENT
from .several import check_mixture, environments_of
from .validation import check_task_columns

if TYPE_CHECKING:
    from datasets import Dataset

# The one column of a `tasks_dataset`, and the format that decodes it.
COLUMN, FORMAT = "g2po_task", "g2po_tasks"


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """Return the tasks of a file, one JSON object per line or an array. Raises `G2POError`, naming file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise G2POError(f"tasks is {str(path)!r}, which cannot be read: {error}") from error
    rows = []
    for number, row in json_values(io.BytesIO(text.encode())):
        if isinstance(row, bytes):
            try:
                json.loads(row)
            except (ValueError, RecursionError) as error:
                raise G2POError(f'{path}, line {number}, is not valid JSON ({error}): write {{"seed": 1}}') from error
        if not isinstance(row, dict):
            raise G2POError(f'{path}, line {number}, is {json.dumps(row)[:40]}: write an object, like {{"seed": 1}}')
        rows.append(row)
    return rows


def split_tasks(
    tasks: str | Path, eval_tasks: str | Path | None = None, num_eval_tasks: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and the held-out tasks: those in `eval_tasks`, else the last lines of `tasks` (20 %)."""
    train = read_tasks(tasks)
    if eval_tasks is not None:
        held_out = read_tasks(eval_tasks)
    else:
        number = max(1, len(train) // 5) if num_eval_tasks is None else num_eval_tasks
        if not 0 < number < len(train):
            raise G2POError(
                f"num_eval_tasks is {number} and {tasks} has {len(train)} tasks: hold out at least 1 and leave at "
                "least 1, or pass --eval-tasks FILE"
            )
        train, held_out = train[:-number], train[-number:]
    for name, rows in ((tasks, train), (eval_tasks, held_out)):
        if not rows:
            raise G2POError(f"{name} has no tasks: write one JSON object per line")
    return train, held_out


class _Absent:
    """Placeholder in a batch of rows for a column that a row lacks."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def tasks_dataset(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    """Return a `Dataset` that passes rows to `reset` unchanged.

    `Dataset.from_list` stores rows as a table: it drops columns that the first row lacks, fills missing values with
    `None`, merges the keys of nested dictionaries, and converts integers to floats in mixed columns. This dataset
    stores each row as JSON text and decodes it on access. Select, shuffle and save as usual; `map` the rows before.

    Args:
        rows: keyword arguments of the environment's `reset`, as plain JSON data.

    Raises:
        G2POError: for the first row that JSON does not preserve.
    """
    from datasets import Dataset, Features, Value  # slow to import, and not needed to read a tasks file

    texts = [_as_text(row, number) for number, row in enumerate(rows, 1)]
    _register_format()
    return Dataset.from_dict({COLUMN: texts}, features=Features({COLUMN: Value("string")})).with_format(FORMAT)


def _register_format() -> None:
    """Make `FORMAT` known to `datasets`, which saves and loads a format by its name, but no function."""
    from datasets import formatting

    class TasksFormatter(formatting.CustomFormatter):
        def __init__(self, **kwargs: Any):
            super().__init__(_decoded, **kwargs)

    if FORMAT not in formatting._FORMAT_TYPES:
        formatting._register_formatter(TasksFormatter, FORMAT)


if "datasets" in sys.modules:  # slow to import; `load_from_disk` may come next
    _register_format()


def plain(dataset: Any) -> Any:
    """Return a dataset, or each of a dictionary, with rows of plain Python values instead of a `with_format`'s.

    A `with_transform` is kept; arrays in its batches become lists. Other values are returned unchanged.
    """
    from datasets import Dataset

    if isinstance(dataset, Mapping):
        return {name: plain(one) for name, one in dataset.items()}
    if not isinstance(dataset, Dataset):
        return dataset
    if COLUMN in dataset.column_names:
        _register_format()
        return dataset.with_format(FORMAT)
    kind, columns, all_columns = (dataset.format[name] for name in ("type", "columns", "output_all_columns"))
    if kind == "custom":
        transform = dataset.format["format_kwargs"]["transform"]
        return dataset.with_transform(partial(_plain_batch, transform), columns, all_columns)
    return dataset if kind is None else dataset.with_format(None, columns=None if all_columns else columns)


def _plain_batch(transform: Callable, batch: Mapping[str, Any]) -> dict[str, Any]:
    return _plain_value(dict(transform(batch)))


def _as_text(row: Mapping[str, Any], number: int) -> str:
    try:
        text = json.dumps(dict(row))
    except (TypeError, ValueError) as error:
        raise G2POError(f"task {number} is not plain data ({error}): use strings, numbers, lists and dicts") from error
    if repr(json.loads(text)) != repr(dict(row)):  # repr distinguishes 1, 1.0 and True
        raise G2POError(
            f"task {number} would be read back as {text[:80]}: use lists for tuples, and strings as keys of dicts"
        )
    return text


def _decoded(batch: Mapping[str, list[str]]) -> dict[str, list[Any]]:
    """Return a batch of JSON rows as columns, as `datasets` requires."""
    rows = [json.loads(text) for text in batch[COLUMN]]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, ABSENT) for row in rows] for name in names}
    return columns if columns or len(rows) == 1 else {COLUMN: [ABSENT] * len(rows)}


def own_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a batch without the columns that only other rows have."""
    return {name: value for name, value in row.items() if value is not ABSENT}


def _plain_value(value: Any) -> Any:
    """Return numbers and arrays of numpy or torch as Python's: panels are files, and `reset` must get the same."""
    if isinstance(value, dict):
        return {name: _plain_value(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain_value(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def task_id_of(task: Mapping[str, Any]) -> str:
    """Return the row's `task_id`, or a hash of its content if it has none."""
    if task.get("task_id") is not None:
        return str(task["task_id"])
    content = json.dumps(task, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def tasks_hash(tasks: Iterable[dict[str, Any]]) -> str:
    """Return a hash of a list of tasks that is independent of their order."""
    names = sorted(json.dumps(task, sort_keys=True, default=lambda value: str(_plain_value(value))) for task in tasks)
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def panels_of(eval_dataset: Dataset | Mapping[str, Dataset] | None) -> dict[str, Dataset]:
    """Return evaluation sets by name; one without a name is "eval"."""
    panels = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return {name: dataset for name, dataset in panels.items() if dataset is not None}


def check_datasets(environment_factory, train_dataset, eval_dataset) -> None:
    """Refuse what is not a `Dataset` with rows, and rows that `reset` does not accept or that change when read."""
    datasets = {"train": train_dataset, **panels_of(eval_dataset)}
    for name, dataset in datasets.items():
        _check_kind(f"{name}_dataset" if name in ("train", "eval") else f"eval_dataset[{name!r}]", dataset)
    check_mixture(environment_factory, datasets)
    for name, dataset in datasets.items():
        check_rows(environment_factory, name, dataset)


def check_rows(environment_factory, name: str, dataset) -> None:
    """Refuse what is not a `Dataset` with rows, and rows that `reset` does not accept or that change when read."""
    _check_kind(f"{name} dataset", dataset)
    for where, row in _different_rows(dataset, bool(environments_of(environment_factory))).items():
        try:
            check_task_columns(environment_factory, row)
        except ValueError as error:
            raise G2POError(f"{name} dataset{where}: {error}") from error
    row, again = dataset[0], dataset[0]
    for column, value in row.items():
        if task_id_of({column: value}) != task_id_of({column: again[column]}):
            raise G2POError(
                f"{name} dataset: {column} is {show(value)}, whose text differs each time it is read, so rows "
                "cannot be told apart: store a number or the path of a file, and load it in reset"
            )


def _check_kind(name: str, dataset: Any) -> None:
    """Refuse what is not a `Dataset` with rows."""
    from datasets import Dataset  # slow to import, and not needed to read a tasks file

    if not isinstance(dataset, Dataset) or not len(dataset):
        problem = "without rows" if isinstance(dataset, Dataset) else ""
        raise G2POError(
            f"{name} is {type(dataset).__name__} {problem}: pass a Dataset with one row per task, e.g. "
            "tasks_dataset([{'seed': i} for i in range(99)]) of a list, or one split of a dictionary of them"
        )


def _different_rows(dataset: Dataset, are_mixed: bool) -> dict[str, Mapping[str, Any]]:
    """Return the first row of each distinct set of columns, by its place: one for a table of one environment.

    `are_mixed`: of several environments, whose rows differ in the columns with a value.
    """
    if COLUMN not in dataset.column_names and not are_mixed:
        return {"": dict.fromkeys(dataset.column_names)}
    first: dict[Any, tuple[str, Mapping[str, Any]]] = {}
    for number, row in enumerate(dataset, 1):
        names = [(name, value is None) for name, value in row.items()] if are_mixed else row
        first.setdefault((row.get(ENVIRONMENT) if are_mixed else None, *sorted(names)), (f", row {number}", row))
    return dict(first.values())
