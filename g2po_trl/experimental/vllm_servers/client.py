"""HTTP to servers that may die: the one with the fewest requests is asked, and one that fails is left out."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

CONNECTING = 10.0  # seconds
TELLING = 60.0  # for what takes no computing, however much else it computes
KEPT = 3.0  # seconds that an idle connection is used again: vLLM closes one after 5


class ServerUnavailable(Exception):
    """A server that cannot be asked now: it refuses connections, breaks them, is late, or answers nonsense.

    `status`: of HTTP, if it has answered by an error of its own.
    """

    status: int | None = None


class RequestRejected(RuntimeError):
    """What a server has understood and does not do. `status` is that of HTTP."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RequestCancelled(Exception):
    """Nobody waits for this answer any more."""


class _UntilDeadline(io.RawIOBase):
    """What a socket receives, up to a time: its own time-out starts anew with each byte."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection, self._deadline = connection, deadline
        self._stream = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the reply has not come in whole")
        self._connection.settimeout(left)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that has come in whole by the deadline, or raises TimeoutError."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_UntilDeadline(sock, deadline))


class Server:
    """One server, asked from many threads, each with a connection of its own, kept for the next request.

    `version`: of the weights that its process must have. Each new connection asks for it, since a server that was
    started again is another process, with other weights, behind the same address. `control`: the same server for
    those that give it weights, who speak to whichever process is there. `lost`: why it is left out.
    """

    def __init__(self, url: str, has_control: bool = True):
        self.url, self.parts = url.rstrip("/"), urlsplit(url)
        self.version: str | None = None
        self.lost: str | None = None
        self.under_way = 0
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock, self._call = threading.Lock(), 0
        self.control = Server(url, has_control=False) if has_control else self

    def get(self, path: str, timeout: float = TELLING, wanted: Callable[[], bool] | None = None) -> Any:
        return self.call("GET", path, None, timeout, wanted)

    def post(self, path: str, body: dict[str, Any], timeout: float, wanted: Callable[[], bool] | None = None) -> Any:
        return self.call("POST", path, body, timeout, wanted)

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout: float,
        wanted: Callable[[], bool] | None = None,
    ) -> Any:
        """The JSON of the answer; `None` for an empty one, the text of any other.

        Args:
            wanted: does anybody wait for it still? Whoever calls `interrupt` makes it False before.

        Raises:
            ServerLost, Refused, Abandoned: see there.
        """
        call, data = self._call, None if body is None else json.dumps(body).encode()
        if wanted is not None and not wanted():
            raise RequestCancelled
        try:
            kept = self._kept()
            if kept is None:
                return self._exchange(self._connect(call), call, method, path, data, timeout)
            try:
                return self._exchange(kept, call, method, path, data, timeout)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                if self.control is not self:  # a reply: the next server gives it
                    raise
                # Perhaps closed while it was idle, and what is told a server may be told twice.
                return self._exchange(self._connect(call), call, method, path, data, timeout)
        except TimeoutError as error:
            raise ServerUnavailable(f"no answer in {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}") from error

    def interrupt(self) -> None:
        """End all calls, by `RequestCancelled`. The server sees its clients gone, and stops computing."""
        with self._lock:
            self._call += 1
            for connection in self._busy:
                if connection.sock is not None:
                    try:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass  # it has just ended
            for connection, _ in self._idle:
                connection.close()
            self._idle.clear()
        if self.control is not self:
            self.control.interrupt()

    def _kept(self) -> http.client.HTTPConnection | None:
        with self._lock:
            while self._idle:
                connection, since = self._idle.pop()
                if time.monotonic() - since < KEPT and not _is_closed(connection.sock):
                    return connection
                connection.close()
        return None

    def _connect(self, call: int) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.parts.hostname, self.parts.port, timeout=CONNECTING)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ServerUnavailable(f"no connection in {CONNECTING:g} s") from error
        _notice_dead_hosts(connection.sock)
        if self.version is not None:
            found = self._exchange(connection, call, "GET", "/weight_info", None, TELLING, keep=False)
            if not isinstance(found, dict) or found.get("weight_version") != self.version:
                connection.close()
                raise ServerUnavailable(
                    "it has other weights: it was started again, or another run has loaded its own"
                )
            if connection.sock is None:
                raise ServerUnavailable(
                    "it closes each connection, so that nobody knows which process answers the next"
                )
        return connection

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        call: int,
        method: str,
        path: str,
        data: bytes | None,
        timeout: float,
        keep: bool = True,
    ) -> Any:
        with self._lock:
            if call != self._call:
                connection.close()
                raise RequestCancelled
            self._busy.add(connection)
        whole = False
        try:
            connection.sock.settimeout(timeout)
            connection.response_class = partial(_Response, deadline=time.monotonic() + timeout)
            connection.request(method, path, data, _headers(data is not None))
            response = connection.getresponse()
            answer = response.read()
            whole = not response.will_close
        except (OSError, http.client.HTTPException) as error:
            if call != self._call:
                raise RequestCancelled from error
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                if whole and keep and call == self._call:
                    self._idle.append((connection, time.monotonic()))
                elif not (whole and not keep):
                    connection.close()
        return _read(response.status, answer)


class Servers:
    """Which of several servers is asked.

    Args:
        urls: of the servers.
        first: who is preferred among those with as few requests; ranks differ in it.
    """

    def __init__(self, urls: Sequence[str], first: int = 0):
        self.all = [Server(url) for url in urls]
        self._first, self._lock = first % len(self.all), threading.Lock()

    @property
    def live(self) -> list[Server]:
        return [server for server in self.all if server.lost is None]

    def take(self) -> Server | None:
        """The one with the fewest requests under way, with one more now; `None` if all are left out."""
        with self._lock:
            order = self.all[self._first :] + self.all[: self._first]
            server = min((s for s in order if s.lost is None), key=lambda s: s.under_way, default=None)
            if server is not None:
                server.under_way += 1
            return server

    def give_back(self, server: Server) -> None:
        with self._lock:
            server.under_way -= 1

    def leave_out(self, server: Server, reason: str) -> None:
        """Ask it no more. The first reason is kept, and told."""
        with self._lock:
            if server.lost is not None:
                return
            server.lost = reason
        logger.warning("%s is left out until the next rollout: %s", server.url, reason)

    def why(self) -> str:
        return "; ".join(f"{server.url}: {server.lost}" for server in self.all if server.lost is not None)


def _headers(has_body: bool) -> dict[str, str]:
    headers = {"Content-Type": "application/json"} if has_body else {}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _read(status: int, answer: bytes) -> Any:
    text = answer.decode(errors="replace")
    if status >= 500 or status in (408, 429):
        lost = ServerUnavailable(f"HTTP {status}: {text[:500]}")
        lost.status = status
        raise lost
    if status >= 300:
        raise RequestRejected(status, f"HTTP {status}: {text[:500]}")
    if not answer:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_closed(connection: socket.socket) -> bool:
    """Nothing was asked: what there is to read is its end."""
    with selectors.DefaultSelector() as selector:  # `select` knows 1,024 files only
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _notice_dead_hosts(connection: socket.socket) -> None:
    """A host that loses its power closes nothing: ask the network every ten seconds whether it is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
