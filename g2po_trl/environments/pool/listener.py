"""Hearing workers: which have something to say, hang or died. Nobody is waited for while another has spoken."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Iterator, Sequence

from .worker_process import WorkerProcess

LOOK = 1.0  # seconds between two looks at whether processes live: what one forked can hold its channel open
DYING = 1.0  # seconds a process may take to end after it has closed its channel
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listener:
    """The channels of all workers in service."""

    def __init__(self):
        self._selector = selectors.DefaultSelector()
        self._looked = 0.0

    def fileno(self) -> int:
        """Readable as soon as a worker says something."""
        return self._selector.fileno()

    def add(self, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, READ | (WRITE if worker.channel.unsent else 0), worker)

    def sent(self, worker: WorkerProcess) -> None:
        """To be called after sending: what the worker did not take at once is sent while it is listened to."""
        if worker.channel.unsent and worker.hung_up is None:
            self._selector.modify(worker.channel, READ | WRITE, worker)

    def remove(self, worker: WorkerProcess) -> None:
        """To be called before its channel is closed."""
        with contextlib.suppress(KeyError):  # it was, when it hung up
            self._selector.unregister(worker.channel)

    def close(self) -> None:
        self._selector.close()

    def listen(
        self, workers: Sequence[WorkerProcess], patience: float
    ) -> Iterator[tuple[WorkerProcess, list[bytes], str | None]]:
        """Wait at most `patience` seconds for one to say something.

        Yields:
            The workers that did or were lost, what they said, and `"timeout"`, `"crash"` or `"garbled"` if they were.
        """
        before = time.monotonic()
        until = before + min(patience, LOOK)
        for worker in workers:
            if worker.hung_up is not None:
                until = min(until, before + 0.005)
            elif worker.owed and worker.deadline < until:
                until = worker.deadline
        events = {key.data: mask for key, mask in self._selector.select(max(0.0, until - before))}
        now = time.monotonic()
        look = now - self._looked >= LOOK
        if look:
            self._looked = now
        for worker in list(workers):
            spoke = events.get(worker, 0)
            late = worker.owed and now > worker.deadline
            if (spoke or look or late or worker.hung_up is not None) and worker.in_service:  # it may have left
                said, fate = self._of(worker, spoke, look, now)
                if said or fate:
                    yield worker, said, fate

    def _of(self, worker: WorkerProcess, spoke: int, look: bool, now: float) -> tuple[list[bytes], str | None]:
        if spoke & WRITE:
            worker.flush()
            if not worker.channel.unsent:
                self._selector.modify(worker.channel, READ, worker)
        dead = (look or worker.hung_up is not None) and worker.is_dead()
        said: list[bytes] = []
        if worker.hung_up is None and (spoke & READ or dead or (worker.owed and now > worker.deadline)):
            try:
                said = worker.receive()
            except EOFError:
                self.remove(worker)
                worker.hung_up = now
            if worker.channel.garbled:
                return said, "garbled"
        if worker.hung_up is not None:
            return said, "crash" if worker.is_dead() or now - worker.hung_up > DYING else None
        if dead and not spoke & READ:
            return said, "crash"
        return said, "timeout" if worker.owed and not said and now > worker.deadline else None
