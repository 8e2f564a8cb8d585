"""Standard JSON without NaN, Infinity and lone surrogates, and files that are replaced atomically."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def to_json(data: Any, **options: Any) -> str:
    """Return data as JSON text. `options` are passed to `json.dumps`.

    A float that is not finite becomes `null`, a numpy value a number or a list, a set a sorted list, a lone surrogate
    "?", and any other object its text.
    """
    options = {"ensure_ascii": False, "allow_nan": False, **options}
    try:
        text = json.dumps(data, **options)
    except (TypeError, ValueError):  # rare: converting every value first would cost more than dumping
        text = json.dumps(to_plain(data), **options)
    return text.encode("utf-8", "replace").decode("utf-8")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` when the block ends without an error; create its folder.

    Readers, also after a kill, see the old file or the new one, never a part of it.
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
    """Write one JSON value per line, replacing the file atomically. `options` are passed to `to_json`."""
    with atomic_write(path) as file:
        file.writelines(to_json(row, **options) + "\n" for row in rows)


def write_json(path: str | Path, data: Any, **options: Any) -> None:
    """Write data as JSON, replacing the file atomically. `options` are passed to `to_json`."""
    write_json_lines(path, [data], **options)


def json_values(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the values in the lines of a file, or of one array, each with its number, from 1.

    A byte order mark and blank lines are skipped. Invalid JSON is yielded as bytes: `json.loads` says why.
    """
    text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    is_array = text.lstrip().startswith(b"[")
    for number, part in enumerate([text] if is_array else text.split(b"\n"), 1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            value = [part] if is_array else part
        yield from enumerate(value, 1) if is_array else [(number, value)]


def read_json_lines(path: str | Path) -> list[Any]:
    """Return the values of a file's lines; invalid lines, such as one cut by a kill, are skipped."""
    return [value for _, value in json_values(path) if not isinstance(value, bytes)]


def to_plain(value: Any) -> Any:
    """Return the value as plain JSON data, by the rules of `to_json`."""
    if isinstance(value, Mapping):
        return {str(name): to_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(map(to_plain, value), key=repr)
    if hasattr(value, "tolist"):  # numpy's arrays and scalars, torch's tensors
        return to_plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # an IntEnum member, whose class may not unpickle elsewhere, becomes an int
        return int(value)
    return str.__str__(value) if isinstance(value, str) else str(value)
