"""The error for everything that a user can fix."""

from typing import Any


class G2POError(ValueError):
    """Report an option, a file or data that the user can fix.

    The message names the field (an option, a column, a file or a method), its value and the remedy, so commands print
    it without a traceback. Every other error is a bug and keeps its traceback. Programs read `field` and `value`, or
    `None` where there is none, never the sentence.
    """

    def __init__(self, message: str, field: str | None = None, value: Any = None):
        super().__init__(message)
        self.field, self.value = field, value
