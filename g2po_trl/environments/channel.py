"""Messages between the pool and a worker: bytes over a socket, with their length in front."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("!Q")


class Channel:
    """The pool's end. Neither sending nor receiving waits, so that no worker holds the pool up."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._connection = connection
        self._outgoing, self._incoming = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def unsent(self) -> int:
        """Bytes the worker has not taken yet: call `flush` when the socket can be written to."""
        return len(self._outgoing)

    def send(self, message: bytes) -> None:
        self._outgoing += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the worker has ended: what it does not answer will tell
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """The messages that have arrived in whole.

        Raises:
            EOFError: when there are none and none will come.
        """
        ended = False
        try:
            while received := self._connection.recv(1 << 18):
                self._incoming += received
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        messages = []
        while len(self._incoming) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[LENGTH.size : end]))
            del self._incoming[:end]
        if ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        self._connection.close()


class WorkerEnd:
    """The worker's end, which waits: it has nothing else to do."""

    def __init__(self, descriptor: int):
        self._connection = socket.socket(fileno=descriptor)
        self._file = self._connection.makefile("rb")

    def send(self, message: bytes) -> None:
        self._connection.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """The next message.

        Raises:
            EOFError: when the pool has gone.
        """
        return self._read(LENGTH.unpack(self._read(LENGTH.size))[0])

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data
