"""HTTP client for servers that may fail: requests go to the server with the fewest, and failed ones are excluded."""

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
    """The server refuses or breaks connections, is late, or returns an invalid response.

    `status` is the HTTP status of an error response.
    """

    status: int | None = None


class RequestRejected(RuntimeError):
    """The server rejects a request. `status` is the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RequestCancelled(Exception):
    """The response is not awaited any more."""


class _UntilDeadline(io.RawIOBase):
    """Stream of a socket with a deadline for the whole response; a socket's own time-out restarts with each byte."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection, self._deadline = connection, deadline
        self._stream = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the response has not come in whole")
        self._connection.settimeout(left)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that arrives completely by the deadline, or raises `TimeoutError`."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_UntilDeadline(sock, deadline))


class Server:
    """One server, used from many threads, with a pool of connections.

    `version` is the version of the weights that its process must have. Each new connection checks it, because a
    restarted server is another process, with other weights, at the same address. `control` is the same server without
    this check, for loading weights. `lost` is the reason why it is excluded, or `None`.
    """

    def __init__(self, url: str, has_control: bool = True):
        self.url, self.parts = url.rstrip("/"), urlsplit(url)
        self.version: str | None = None
        self.lost: str | None = None
        self.in_flight = 0
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
        """Send a request and return the JSON of the response; `None` if it is empty, its text if it is not JSON.

        Args:
            method: of HTTP.
            path: of the URL.
            body: JSON object to send, or `None`.
            timeout: seconds until the complete response.
            wanted: returns whether the response is still awaited; it must return `False` before `interrupt` is called.

        Raises:
            ServerUnavailable: if the server cannot be reached, or fails.
            RequestRejected: if the server rejects the request.
            RequestCancelled: if the response is not awaited any more.
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
                if self.control is not self:  # a completion: another server computes it
                    raise
                # It may have been closed while idle; control requests can be repeated safely.
                return self._exchange(self._connect(call), call, method, path, data, timeout)
        except TimeoutError as error:
            raise ServerUnavailable(f"no answer in {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}") from error

    def interrupt(self) -> None:
        """End all calls with `RequestCancelled`, and close connections, so that the server stops computing."""
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
    """Selects the server of each request.

    Args:
        urls: addresses of the servers.
        first: index of the preferred server among equally busy ones; it differs between ranks.
    """

    def __init__(self, urls: Sequence[str], first: int = 0):
        self.all = [Server(url) for url in urls]
        self._first, self._lock = first % len(self.all), threading.Lock()

    @property
    def available(self) -> list[Server]:
        return [server for server in self.all if server.lost is None]

    def acquire(self) -> Server | None:
        """Return the server with the fewest requests in flight and count one more; `None` if all are excluded."""
        with self._lock:
            order = self.all[self._first :] + self.all[: self._first]
            server = min((s for s in order if s.lost is None), key=lambda s: s.in_flight, default=None)
            if server is not None:
                server.in_flight += 1
            return server

    def release(self, server: Server) -> None:
        with self._lock:
            server.in_flight -= 1

    def exclude(self, server: Server, reason: str) -> None:
        """Send no more requests to a server. The first reason is kept, and logged."""
        with self._lock:
            if server.lost is not None:
                return
            server.lost = reason
        logger.warning("%s is left out until the next rollout: %s", server.url, reason)

    def reasons(self) -> str:
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
    """Return whether the server has closed an idle connection."""
    with selectors.DefaultSelector() as selector:  # `select` knows 1,024 files only
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _notice_dead_hosts(connection: socket.socket) -> None:
    """Probe the connection every ten seconds, to detect a host that lost its power."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
