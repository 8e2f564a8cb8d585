"""JSON that every reader takes: no NaN, no Infinity, no half a character."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def to_json(data: Any, **options: Any) -> str:
    """JSON text of plain data.

    A float that is not finite becomes `null`, a numpy value a number or a list, a lone surrogate "?", and any other
    object its text. `options` are those of `json.dumps`.
    """
    options = {"ensure_ascii": False, "allow_nan": False, **options}
    try:
        text = json.dumps(data, **options)
    except (TypeError, ValueError):  # seldom: looking at every value first would cost more than writing them
        text = json.dumps(plain(data), **options)
    return text.encode("utf-8", "replace").decode("utf-8")


@contextmanager
def written_beside(path: str | Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block has ended without an error; its folder is made.

    Whenever the process is killed, or a reader looks, there is the old file or the new one, not half of it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            yield file
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    beside.replace(path)


def write_json_lines(path: str | Path, rows: Iterable[Any], **options: Any) -> None:
    """A file with one value a line, as JSON, written beside the old one. `options` are those of `to_json`."""
    with written_beside(path) as file:
        file.writelines(to_json(row, **options) + "\n" for row in rows)


def write_json(path: str | Path, data: Any, **options: Any) -> None:
    """Write `to_json` and a line's end, beside the old file."""
    with written_beside(path) as file:
        file.write(to_json(data, **options) + "\n")


def json_lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1.

    Not `str.splitlines`: JSON text may hold U+2028, U+2029 and U+0085, at which that cuts.
    """
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def read_json_lines(path: str | Path) -> list[Any]:
    """What the lines of a file say, as far as they can be read: one that a kill cut is as if it were not there."""
    rows = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError:  # no JSON, or half a character
            continue
    return rows


def plain(value: Any) -> Any:
    """The value as data that JSON has, by the rules of `to_json`."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):  # numpy's arrays and scalars, torch's tensors
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # also an Enum's member: its class may not unpickle elsewhere
        return int(value)
    return str.__str__(value) if isinstance(value, str) else str(value)
