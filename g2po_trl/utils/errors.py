"""The error for everything that a user can fix."""


class G2POError(ValueError):
    """Report an option, a file or data that the user can fix.

    The message names the field, its value and the remedy, so commands print it without a traceback. Every other
    error is a bug and keeps its traceback.
    """
