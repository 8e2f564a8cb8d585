"""Length-prefixed messages between the pool and a worker, over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref

LENGTH = struct.Struct("!Q")
CHUNK_BYTES = 1 << 16  # per read
MAX_MESSAGE_BYTES = 1 << 28  # of a worker, which may write anything
MAX_CHUNKS = 16  # per call, so that a worker that never stops writing does not block the pool


class Channel:
    """The pool's end of a connection. Sending and receiving never block. Neither programs nor forks inherit it."""

    max_message_bytes: float = MAX_MESSAGE_BYTES

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._outgoing, self._incoming = bytearray(), bytearray()
        _OPEN.add(self)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def unsent(self) -> int:
        """Bytes not sent yet: call `flush` when the socket is writable."""
        return len(self._outgoing)

    @property
    def partial_bytes(self) -> int:
        """Bytes received of an incomplete message."""
        return len(self._incoming)

    def send(self, message: bytes) -> None:
        self._outgoing += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send as many bytes as the socket accepts now."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:  # the worker ended; `receive` detects it
            self._outgoing.clear()

    def receive(self, wait: bool = False) -> list[bytes]:
        """Return the complete messages by now (`wait`: after the first bytes). Raises `EOFError` at the end."""
        flags, ended = 0 if wait else socket.MSG_DONTWAIT, False
        try:
            for _ in range(MAX_CHUNKS):
                received = self._connection.recv(CHUNK_BYTES, flags)
                self._incoming += received
                if len(received) < CHUNK_BYTES:
                    ended = not received
                    break
                flags = socket.MSG_DONTWAIT
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        messages = []
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if end > LENGTH.size + self.max_message_bytes:
                return [*messages, b"a message above the maximum size"]  # which is no answer
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[LENGTH.size : end]))
            del self._incoming[:end]
        if ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        """Dismiss the worker with an empty message, without which the pool has died, and close the connection."""
        if not self._outgoing:
            with contextlib.suppress(OSError):
                self._connection.send(LENGTH.pack(0), socket.MSG_DONTWAIT)
        self._connection.close()


class WorkerChannel(Channel):
    """The worker's end of a connection. Sending blocks."""

    max_message_bytes = float("inf")

    def __init__(self, descriptor: int):
        super().__init__(socket.socket(fileno=descriptor))
        self._connection.set_inheritable(False)

    def send(self, message: bytes) -> None:
        self._connection.sendall(LENGTH.pack(len(message)) + message)


_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked process's copies: each end must detect the death of the other, even if that has forked."""
    for channel in _OPEN:
        channel._connection.close()


os.register_at_fork(after_in_child=_close_in_child)
