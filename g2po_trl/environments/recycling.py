"""Which workers are replaced for their age or size. A worker that still plays episodes leaves when they have ended."""

from __future__ import annotations

from dataclasses import dataclass

from .process import WorkerProcess


@dataclass(frozen=True)
class WorkerLimits:
    """See `EnvironmentPool`.

    An old worker that has live episodes plays them to their ends, beside the one that takes its place; of `workers`
    only some do so at once, since they hold memory. A big one ends as soon as it owes no answer: its live episodes are
    played again elsewhere.
    """

    max_resets: int | None = None
    max_memory: float | None = None

    def is_old(self, worker: WorkerProcess, live: int, leaving: int, workers: int) -> bool:
        """Is it to be replaced for its age?

        Args:
            live: episodes that it plays.
            leaving: workers that leave already.
        """
        old = self.max_resets is not None and worker.resets >= self.max_resets
        return old and (not live or leaving < max(1, workers // 4))

    def too_big(self, worker: WorkerProcess, live: int) -> str:
        """Why it is to be replaced for its size, if it is. Looks once in as many resets as it plays episodes."""
        if self.max_memory is None or worker.resets - worker.looked_at < max(1, live):
            return ""
        worker.looked_at = worker.resets
        memory = worker.memory()
        if memory <= self.max_memory:
            return ""
        return f"its worker was replaced: it held {memory:,} bytes, and max_worker_memory is {self.max_memory:,.0f}"
