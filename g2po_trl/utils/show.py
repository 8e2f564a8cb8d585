"""Values in messages."""

from __future__ import annotations

from typing import Any

LONGEST = 80  # characters


def show(value: Any) -> str:
    """Return a value as text for a message, cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # e.g. a number of thousands of digits, or an object whose text cannot be computed
        return f"of type {type(value).__name__}, without a text"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
