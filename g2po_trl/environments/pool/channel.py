"""Length-prefixed messages between the pool and a worker, over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque

LENGTH = struct.Struct("!Q")
CHUNK_BYTES = 1 << 16  # per read
MAX_CHUNKS = 16  # per call, so that a worker that never stops writing does not block the pool
MAX_MESSAGE_BYTES = 1 << 28  # of a worker's message
_FULL_CHUNK = bytes(CHUNK_BYTES)


def split_messages(received: bytearray) -> list[bytes]:
    """Remove the complete messages from the buffer and return them."""
    messages = []
    while len(received) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(received)[0]
        if len(received) < end:
            break
        messages.append(bytes(received[LENGTH.size : end]))
        del received[:end]
    return messages


class Channel:
    """The pool's end of a connection. Sending and receiving never block.

    `corrupt`: the worker announced a message above `MAX_MESSAGE_BYTES`, so the stream cannot be parsed further.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._connection = connection
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.bytes_transferred = 0  # bytes, in both directions
        self.corrupt = False

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
                sent = self._connection.send(self._outgoing)
                self.bytes_transferred += sent
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the worker ended; `receive` detects it
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """Return the complete messages received by now; more may be readable. Raises `EOFError` at the end."""
        ended = False
        try:
            received = _FULL_CHUNK
            for _ in range(MAX_CHUNKS):
                if len(received) < CHUNK_BYTES:
                    break
                received = self._connection.recv(CHUNK_BYTES)
                self.bytes_transferred += len(received)
                self._incoming += received
            ended = not received
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        messages = split_messages(self._incoming)
        if len(self._incoming) >= LENGTH.size:
            self.corrupt = LENGTH.unpack_from(self._incoming)[0] > MAX_MESSAGE_BYTES
        if ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        """Dismiss the worker with an empty message and close the connection.

        Without that message the worker would assume that the pool died.
        """
        if not self._outgoing:
            with contextlib.suppress(OSError):
                self._connection.send(LENGTH.pack(0))
        self._connection.close()


class WorkerChannel:
    """The worker's end of a connection. Sending blocks.

    Child and forked processes do not inherit it.
    """

    def __init__(self, descriptor: int):
        self._connection = socket.socket(fileno=descriptor)
        self._connection.set_inheritable(False)
        os.register_at_fork(after_in_child=self._connection.close)
        self._incoming, self._arrived = bytearray(), deque()

    def send(self, message: bytes) -> None:
        self._connection.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Wait for the next message and return it. Raises `EOFError` if the pool has ended."""
        while not self._arrived:
            self._read(0)
        return self._arrived.popleft()

    def arrived(self) -> list[bytes]:
        """Return all messages received by now."""
        self._read(socket.MSG_DONTWAIT)
        messages = list(self._arrived)
        self._arrived.clear()
        return messages

    def _read(self, flags: int) -> None:
        try:
            received = _FULL_CHUNK
            while len(received) == CHUNK_BYTES:
                received = self._connection.recv(CHUNK_BYTES, flags)
                self._incoming += received
                flags = socket.MSG_DONTWAIT
            if not received:
                raise EOFError
        except BlockingIOError:
            pass
        self._arrived += split_messages(self._incoming)
