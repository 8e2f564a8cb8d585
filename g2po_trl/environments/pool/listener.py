"""Wait for messages of workers, and detect workers that time out or die."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence

from .worker_process import WorkerProcess

CHECK_SECONDS = 1.0  # between checks for dead processes, whose forks can keep the channel open
EXIT_SECONDS = 1.0  # a process may take to end after it closed its channel
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listener:
    """Selector over the channels of all workers in service."""

    def __init__(self):
        self._selector = selectors.DefaultSelector()
        self._checked_at = 0.0

    def add(self, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, READ | (WRITE if worker.channel.unsent else 0), worker)

    def sent(self, worker: WorkerProcess) -> None:
        """Watch for writability after a send that left bytes unsent."""
        if worker.channel.unsent:
            self._selector.modify(worker.channel, READ | WRITE, worker)

    def remove(self, worker: WorkerProcess) -> None:
        """Stop watching a worker; call it before its channel is closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.channel)

    def close(self) -> None:
        self._selector.close()

    def listen(
        self, workers: Sequence[WorkerProcess], patience: float
    ) -> Iterator[tuple[WorkerProcess, list[bytes], str | None]]:
        """Wait at most `patience` seconds for a message.

        Yields:
            A worker, its messages, and `"timeout"`, `"crash"` or `"corrupt"` if it failed, else `None`.
        """
        before = time.monotonic()
        until = min([before + min(patience, CHECK_SECONDS), *(w.deadline for w in workers if w.pending_jobs)])
        events = {key.data: mask for key, mask in self._selector.select(max(0.0, until - before))}
        now = time.monotonic()
        check = now - self._checked_at >= CHECK_SECONDS
        if check:
            self._checked_at = now
        for worker in list(workers):
            if worker.in_service:  # it may have been retired
                messages, failure_kind = self._poll(worker, events.get(worker, 0), check, now)
                if messages or failure_kind:
                    yield worker, messages, failure_kind

    def _poll(self, worker: WorkerProcess, mask: int, check: bool, now: float) -> tuple[list[bytes], str | None]:
        if mask & WRITE:
            worker.flush()
            if not worker.channel.unsent:
                self._selector.modify(worker.channel, READ, worker)
        dead = check and worker.is_dead()
        messages: list[bytes] = []
        if mask & READ or dead or worker.is_late(now):
            try:
                messages = worker.receive()
            except EOFError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(EXIT_SECONDS)
                return [], "crash"
            if worker.channel.corrupt:
                return messages, "corrupt"
        if dead and not mask & READ:
            return messages, "crash"
        return messages, "timeout" if not messages and worker.is_late(now) else None
