"""Wait for messages of workers, and detect workers that time out or die."""

from __future__ import annotations

import contextlib
import selectors
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

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker has sent a message."""
        return self._selector.fileno()

    def add(self, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, READ | (WRITE if worker.channel.unsent else 0), worker)

    def sent(self, worker: WorkerProcess) -> None:
        """Watch for writability after a send that left bytes unsent."""
        if worker.channel.unsent and worker.disconnected_at is None:
            self._selector.modify(worker.channel, READ | WRITE, worker)

    def remove(self, worker: WorkerProcess) -> None:
        """Stop watching a worker; call it before its channel is closed."""
        with contextlib.suppress(KeyError):  # already removed when it disconnected
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
        until = before + min(patience, CHECK_SECONDS)
        for worker in workers:
            if worker.disconnected_at is not None:
                until = min(until, before + 0.005)
            elif worker.pending_jobs and worker.deadline < until:
                until = worker.deadline
        events = {key.data: mask for key, mask in self._selector.select(max(0.0, until - before))}
        now = time.monotonic()
        check = now - self._checked_at >= CHECK_SECONDS
        if check:
            self._checked_at = now
        for worker in list(workers):
            mask = events.get(worker, 0)
            late = worker.pending_jobs and now > worker.deadline
            if (
                mask or check or late or worker.disconnected_at is not None
            ) and worker.in_service:  # it may have been retired
                messages, failure_kind = self._poll(worker, mask, check, now)
                if messages or failure_kind:
                    yield worker, messages, failure_kind

    def _poll(self, worker: WorkerProcess, mask: int, check: bool, now: float) -> tuple[list[bytes], str | None]:
        if mask & WRITE:
            worker.flush()
            if not worker.channel.unsent:
                self._selector.modify(worker.channel, READ, worker)
        dead = (check or worker.disconnected_at is not None) and worker.is_dead()
        messages: list[bytes] = []
        if worker.disconnected_at is None and (mask & READ or dead or (worker.pending_jobs and now > worker.deadline)):
            try:
                messages = worker.receive()
            except EOFError:
                self.remove(worker)
                worker.disconnected_at = now
            if worker.channel.corrupt:
                return messages, "corrupt"
        if worker.disconnected_at is not None:
            return messages, "crash" if worker.is_dead() or now - worker.disconnected_at > EXIT_SECONDS else None
        if dead and not mask & READ:
            return messages, "crash"
        return messages, "timeout" if worker.pending_jobs and not messages and now > worker.deadline else None
