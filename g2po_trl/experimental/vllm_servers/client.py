"""HTTP client for servers that may fail: requests go to the least busy server, and failed servers are excluded.

All requests run in one event loop in a separate thread: `asyncio` limits the time of a whole response, and ends
abandoned requests. Connections are httpcore2's, the transport of httpx2, because each has to be checked before it is
used, and httpx2 hides them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

import httpcore2

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

CONNECTING = 10.0  # seconds
CONTROL_TIMEOUT = 60.0  # for what takes no computing, however much else it computes
LOADING = 1800.0  # for loading weights
KEEPALIVE = 3.0  # seconds that an idle connection is used again: vLLM closes one after 5
PROBES = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, to detect a host that lost its power
SOCKET_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in PROBES.items() if hasattr(socket, name)
]


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


def start(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Start a coroutine in the loop of all requests; `cancel` of the returned future ends its requests."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine in the loop of all requests. Ctrl-C ends its requests."""
    future = start(work)
    try:
        return future.result()
    finally:
        future.cancel()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="g2po-requests", daemon=True).start()
    return loop


class Server:
    """One server.

    `version` is the version of the weights that its process must have to compute completions. Each new connection
    checks it, because a restarted server is another process, with other weights, at the same address. `lost` is the
    reason why it is excluded, or `None`. `in_flight` counts its completions.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.version: str | None = None
        self.lost: str | None = None
        self.in_flight = 0
        self._origin = httpcore2.URL(self.url).origin
        self._tls = ssl.create_default_context() if self._origin.scheme == b"https" else None
        self._idle: list[httpcore2.AsyncHTTPConnection] = []

    async def get(self, path: str) -> Any:
        """Return the JSON of a resource; raises as `complete`."""
        async with self._new_connection() as connection:
            return await self._request(connection, path, None, CONTROL_TIMEOUT)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a command about weights and return the JSON of the response; raises as `complete`."""
        async with self._new_connection() as connection:
            return await self._request(connection, path, body, LOADING)

    async def complete(self, body: dict[str, Any], timeout: float) -> Any:
        """Request a completion of the weights of `version` and return the response's JSON, or its text.

        Raises `ServerUnavailable` if the server cannot be reached, fails, or has other weights;
        `RequestRejected` if it rejects the request.
        """
        connection = await self._idle_connection() or self._new_connection()
        try:
            if not connection.is_idle():
                await self._check(connection)
            answer = await self._request(connection, "/v1/completions", body, timeout)
        except BaseException:
            await connection.aclose()
            raise
        if connection.is_idle():
            self._idle.append(connection)
        return answer

    async def close_idle(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            await self._idle.pop().aclose()

    async def _idle_connection(self) -> httpcore2.AsyncHTTPConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return None

    def _new_connection(self) -> httpcore2.AsyncHTTPConnection:
        return httpcore2.AsyncHTTPConnection(
            self._origin, self._tls, keepalive_expiry=KEEPALIVE, socket_options=SOCKET_OPTIONS
        )

    async def _check(self, connection: httpcore2.AsyncHTTPConnection) -> None:
        """Raise `ServerUnavailable` unless a process with the weights of `version` is at the other end."""
        if self.version is None:
            return
        found = await self._request(connection, "/weight_info", None, CONTROL_TIMEOUT)
        if not isinstance(found, dict) or found.get("weight_version") != self.version:
            raise ServerUnavailable("it has other weights: it was restarted, or another run has loaded its weights")
        if not connection.is_idle():
            raise ServerUnavailable(
                "it closes each connection, so it is unknown which process answers the next request"
            )

    async def _request(
        self,
        connection: httpcore2.AsyncHTTPConnection,
        path: str,
        body: dict[str, Any] | None,
        timeout: float,
    ) -> Any:
        method, content, headers = "GET", None, {}
        if body is not None:
            method, content, headers = "POST", json.dumps(body).encode(), {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY", "").strip():
            headers["Authorization"] = f"Bearer {key}"
        connecting = {"timeout": {"connect": CONNECTING}}
        try:
            async with asyncio.timeout(timeout):
                response = await connection.request(
                    method, self.url + path, headers=headers, content=content, extensions=connecting
                )
        except httpcore2.ConnectTimeout as error:
            raise ServerUnavailable(f"no connection in {CONNECTING:g} s") from error
        except TimeoutError as error:
            raise ServerUnavailable(f"no answer in {timeout:g} s") from error
        except (httpcore2.NetworkError, httpcore2.RemoteProtocolError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # where the system's own words are
                cause = cause.__cause__
            raise ServerUnavailable(f"{type(cause).__name__}: {cause}") from error
        return _read(response.status, response.content)


class Servers:
    """Selects the server of each request, in the loop of all requests.

    Args:
        urls: addresses of the servers.
        first: index of the preferred server among equally busy ones; it differs between ranks.
    """

    def __init__(self, urls: Sequence[str], first: int = 0):
        self.all = [Server(url) for url in urls]
        first %= len(self.all)
        self._order = self.all[first:] + self.all[:first]

    @property
    def available(self) -> list[Server]:
        return [server for server in self.all if server.lost is None]

    def acquire(self) -> Server | None:
        """Return the server with the fewest requests in flight and count one more; `None` if all are excluded."""
        available = (server for server in self._order if server.lost is None)
        server = min(available, key=lambda server: server.in_flight, default=None)
        if server is not None:
            server.in_flight += 1
        return server

    def exclude(self, server: Server, reason: str) -> None:
        """Send no more requests to a server. The first reason is kept, and logged."""
        if server.lost is None:
            server.lost = reason
            logger.warning("%s is left out until the next rollout: %s", server.url, reason)

    def reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.lost}" for server in self.all if server.lost is not None)


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
