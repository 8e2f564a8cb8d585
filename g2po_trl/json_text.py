"""JSON that every reader takes: no NaN, no Infinity, no half a character."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


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


def write_json_lines(path: str | Path, rows: Iterable[Any]) -> None:
    """A file with one value a line, as JSON; its folder is made if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: str | Path, data: Any, **options: Any) -> None:
    """Write `to_json` and a line's end. A kill leaves the old file or the new one, not half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(to_json(data, **options) + "\n", encoding="utf-8")
    beside.replace(path)


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
