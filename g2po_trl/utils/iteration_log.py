"""Iterations in log lines: a rollout and its update may be in one line, or in two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class IterationLog:
    """Converts log lines to iterations.

    With `logging_steps` below the optimizer steps of an iteration, its rollout is in one log line and `time/update` in
    a later one, which may hold the next rollout already.
    """

    _open: dict[str, Any] | None = None

    def add(self, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Add a log line, and yield the iterations that it completes."""
        has_update = entry.get("time/update") is not None
        if self._open is not None and has_update:
            yield {**self._open, "time/update": entry["time/update"]}
            self._open, has_update = None, False
        if "episode/success_rate" not in entry:
            return
        yield from self.close()
        if has_update:
            yield dict(entry)
        else:
            self._open = {name: value for name, value in entry.items() if name != "time/update"}

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the iteration whose update was not logged, if there is one."""
        if self._open is not None:
            yield self._open
        self._open = None
