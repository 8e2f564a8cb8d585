"""Values and foreign texts in messages."""

from __future__ import annotations

import re
from typing import Any

LONGEST = 80  # characters
# Control characters but tab and newline, and marks that reverse the direction of what follows.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def show(value: Any) -> str:
    """Return a value as text for a message, cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # e.g. a number of thousands of digits, or an object whose text cannot be computed
        return f"of type {type(value).__name__}, without a text"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def printable(text: str) -> str:
    """Return a text that a model or an environment wrote, so that a terminal shows it and obeys nothing in it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
