"""Messages between the pool and a worker: bytes over a socket, with their length in front."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque

LENGTH = struct.Struct("!Q")
PIECE = 1 << 16  # bytes that are read at once
PIECES = 16  # that are read of a worker at a time: one that writes without end holds up nobody
LARGEST = 1 << 28  # bytes of a message from a worker
_FULL = bytes(PIECE)


def whole_messages(received: bytearray) -> list[bytes]:
    """Take the messages that have arrived in whole."""
    messages = []
    while len(received) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(received)[0]
        if len(received) < end:
            break
        messages.append(bytes(received[LENGTH.size : end]))
        del received[:end]
    return messages


class Channel:
    """The pool's end. Neither sending nor receiving waits, so that no worker holds the pool up.

    `garbled`: the worker announces a message that is larger than any, so that nothing more can be made out.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._connection = connection
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.moved = 0  # bytes, in both directions
        self.garbled = False

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def unsent(self) -> int:
        """Bytes the worker has not taken yet: call `flush` when the socket can be written to."""
        return len(self._outgoing)

    @property
    def unfinished(self) -> int:
        """Bytes of the message that has not arrived in whole."""
        return len(self._incoming)

    def send(self, message: bytes) -> None:
        self._outgoing += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._outgoing:
                sent = self._connection.send(self._outgoing)
                self.moved += sent
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the worker has ended: what it does not answer will tell
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """The messages that have arrived in whole. There may be more to read.

        Raises:
            EOFError: when there are none and none will come.
        """
        ended = False
        try:
            received = _FULL
            for _ in range(PIECES):
                if len(received) < PIECE:
                    break
                received = self._connection.recv(PIECE)
                self.moved += len(received)
                self._incoming += received
            ended = not received
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        messages = whole_messages(self._incoming)
        if len(self._incoming) >= LENGTH.size:
            self.garbled = LENGTH.unpack_from(self._incoming)[0] > LARGEST
        if ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        """Dismiss the worker: without a word, it would take the pool for dead."""
        if not self._outgoing:
            with contextlib.suppress(OSError):
                self._connection.send(LENGTH.pack(0))
        self._connection.close()


class WorkerEnd:
    """The worker's end. Sending waits: a worker has nothing to do that the pool does not take.

    What the process starts or forks does not have it.
    """

    def __init__(self, descriptor: int):
        self._connection = socket.socket(fileno=descriptor)
        self._connection.set_inheritable(False)
        os.register_at_fork(after_in_child=self._connection.close)
        self._incoming, self._arrived = bytearray(), deque()

    def send(self, message: bytes) -> None:
        self._connection.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """The next message, however long it takes.

        Raises:
            EOFError: when the pool has gone.
        """
        while not self._arrived:
            self._read(0)
        return self._arrived.popleft()

    def arrived(self) -> list[bytes]:
        """All messages that have arrived by now."""
        self._read(socket.MSG_DONTWAIT)
        messages = list(self._arrived)
        self._arrived.clear()
        return messages

    def _read(self, flags: int) -> None:
        try:
            received = _FULL
            while len(received) == PIECE:
                received = self._connection.recv(PIECE, flags)
                self._incoming += received
                flags = socket.MSG_DONTWAIT
            if not received:
                raise EOFError
        except BlockingIOError:
            pass
        self._arrived += whole_messages(self._incoming)
