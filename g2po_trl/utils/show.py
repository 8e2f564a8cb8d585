"""Printed output: values and foreign texts in messages, and streams whose reader may end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import textwrap
from typing import Any

LONGEST, WIDTH = 80, 120  # characters of a shown value, and of a line
ROOM = 40  # characters before and after the place where two texts begin to differ
# Control characters but tab and newline, and marks that reverse the direction of what follows.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def show(value: Any) -> str:
    """Return a value as text for a message, cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # e.g. of a number of thousands of digits
        return f"of type {type(value).__name__}, without a text"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def printable(text: str) -> str:
    """Return a text of a model or an environment without control characters that a terminal would execute."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str, width: int) -> str:
    """Return a text for a terminal in one line of at most `width` characters, cut with "…"."""
    text = " ".join(printable(text).split())
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


def different_parts(first: str, second: str) -> list[str]:
    """Return the parts of two texts around the place where they begin to differ, each in a line that keeps spaces."""
    start = max(0, len(os.path.commonprefix([first, second])) - ROOM)
    end = start + 2 * ROOM
    parts = (f"{'…' * (start > 0)}{text[start:end]}{'…' * (len(text) > end)}" for text in (first, second))
    return [printable(part).translate({9: "⇥", 10: "⏎"}) for part in parts]


def wrapped(text: str, indent: int = 0) -> str:
    """Return a text in lines of at most `WIDTH` characters, the second and later ones indented; words stay whole."""
    wrap = textwrap.TextWrapper(WIDTH, "", " " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) if len(line) > WIDTH else line for line in text.split("\n"))


def describe_exit(status: int) -> str:
    """Return a description of a process's exit status."""
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    return f"exit status {status}" if status >= 0 else f"signal {names.get(-status, -status)}"


class _Output(io.FileIO):
    """A standard stream that discards its output once its reader has ended."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return super().write(data)


def outlive_readers() -> None:
    """Continue when the reader of stdout or stderr ends: results are in files, and a print must not end a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # else it is captured, or was done before
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
            buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            by_line = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=by_line))
