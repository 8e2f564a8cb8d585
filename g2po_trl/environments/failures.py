"""Failures of environments in words, with the line of the user's code."""

from __future__ import annotations

import re
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pool.pool import EnvironmentFailure

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FRAME = re.compile(r'^[ |]*File "(.+)", line (\d+), in ', re.MULTILINE)  # also in the traceback of a group


def where_raised(error: BaseException | str) -> str:
    """Return `, FILE, line N` of the last line of the user's code in an exception or in a traceback's text, or ""."""
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    packages = [Path(find_spec(name).origin).resolve().parent for name in ("g2po_trl", "g2po_envs")]
    for file, line in reversed(_FRAME.findall(text)):
        path = Path(file)
        if path.is_file() and not any(map(path.is_relative_to, packages)) and not file.startswith(_LIBRARIES):
            here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f", {here}, line {line}"
    return ""


def describe_failure(failure: EnvironmentFailure) -> str:
    """Return the predicate of a sentence about a failure, e.g. "times out: …"."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}{where_raised(message)}"
    *before, last = message.strip().splitlines() or [""]  # a traceback's last line says what
    message = last if before and before[0].startswith("Traceback") else " ".join(message.split())
    return {"timeout": "times out: ", "crash": "crashes: "}.get(failure.kind, "") + message
