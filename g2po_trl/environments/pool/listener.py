"""Wait for messages of workers, and detect workers that time out or die."""

from __future__ import annotations

import contextlib
import select
import subprocess
import time
from collections.abc import Iterator, Sequence

from .worker_process import WorkerProcess

CHECK_SECONDS = 1.0  # at most between checks for dead processes
EXIT_SECONDS = 1.0  # a process may take to end after it closed its channel


def listen(
    workers: Sequence[WorkerProcess], patience: float
) -> Iterator[tuple[WorkerProcess, list[bytes], str | None]]:
    """Wait at most `patience` seconds for a message.

    Yields:
        A worker, its messages, and `"timeout"` or `"crash"` if it failed, else `None`.
    """
    poll = select.poll()
    for worker in workers:
        poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.unsent else 0))
    now = time.monotonic()
    seconds = min([patience, CHECK_SECONDS, *(worker.deadline - now for worker in workers if worker.pending_jobs)])
    events = dict(poll.poll(1000 * max(0.0, seconds)))
    for worker in workers:
        if worker.in_service:  # it may have been retired
            messages, failure_kind = _read(worker, events.get(worker.channel.fileno(), 0))
            if messages or failure_kind:
                yield worker, messages, failure_kind


def _read(worker: WorkerProcess, event: int) -> tuple[list[bytes], str | None]:
    if event & select.POLLOUT:
        worker.flush()
    dead = not event and worker.process.poll() is not None  # its forks can keep the channel open
    if not (event & ~select.POLLOUT or dead or worker.is_late()):
        return [], None
    try:
        messages = worker.receive()
    except EOFError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(EXIT_SECONDS)
        return [], "crash"
    failure_kind = "crash" if dead else "timeout" if worker.is_late() else None
    return messages, None if messages else failure_kind
