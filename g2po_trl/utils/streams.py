"""Standard output and error whose reader may end before this process, as in `g2po train … | head`."""

from __future__ import annotations

import contextlib
import io
import os
import sys


class _Output(io.FileIO):
    """A standard stream; from the end of its reader on, what is written to it is lost."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return super().write(data)


def outlive_readers() -> None:
    """Go on when the reader of stdout or stderr ends: what a run writes is in files, and its print must not end it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # closed, captured, or done before
            continue
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
        output = _Output(stream.fileno(), "w", closefd=False)
        buffer = output if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(output)
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, **options))
