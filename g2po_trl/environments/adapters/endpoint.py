"""An endpoint on loopback that speaks OpenAI's chat protocol. Each episode of an agent is a session with its own key.

There is one endpoint in a worker process, started when the first agent needs it. A request waits in its session until
the trainer's model has answered it. Other sessions cannot be reached without their keys, which cannot be guessed.

A request that repeats another one gets the same answer, and is no second step. It has the same body, and

- its client says so, by the same `Idempotency-Key` or by an `x-stainless-retry-count` above 0, as `openai` does, or
- the client of the other one closed its connection before the answer.

Equal requests without such a sign are steps of their own. A request whose client has gone before the answer, and does
not come again, is given up (`Session.given_up`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import queue
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...prompts.conversation import ChatResponse
from .chat_protocol import (
    CompletionRequest,
    RefusedRequestError,
    completion_body,
    event_stream,
    models_body,
    read_request,
    write_completion,
)
from .request_body import read_body

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent: the value it returned, or the exception it raised."""

    value: Any = None
    error: BaseException | None = None


class Call:
    """A request in its session.

    Args:
        request: what the client asks.
        digest: of the body.
        name: the client's name of the request (`Idempotency-Key`), if it gave one.
        connection: the client's.
        limit: seconds that the client waits for an answer, if it says so, as `openai` does.
    """

    def __init__(
        self,
        request: CompletionRequest,
        digest: bytes,
        name: str | None,
        connection: socket.socket,
        limit: float = math.inf,
    ):
        self.request, self.digest, self.name = request, digest, name
        self.connections = [connection]
        self.ends = time.monotonic() + limit
        self.delivered = False
        self.beside_another = False  # which was answered while this one waited
        self.answer: dict[str, Any] | RefusedRequestError | None = None
        self.answered = threading.Event()

    def is_lost(self) -> bool:
        """Return whether all clients that waited for the answer have gone without it."""
        return not self.delivered and all(map(_is_closed, self.connections))

    def is_overdue(self) -> bool:
        """Return whether the client's time limit has passed."""
        return time.monotonic() >= self.ends

    def is_repeated_by(self, other: Call, said: bool) -> bool:
        """Return whether another call is the same request again. `said`: its client says that it repeats one."""
        if self.digest != other.digest:
            return False
        return said or (other.name is not None and other.name == self.name) or self.is_lost()


class Session:
    """The requests of one episode, in their order of arrival, and its end."""

    def __init__(self) -> None:
        self.key = f"sk-g2po-{secrets.token_urlsafe(24)}"
        self.refused: list[str] = []  # why requests could not be read
        self.ignored: set[str] = set()  # fields of requests that the trainer decides otherwise
        self.closed = False
        self._events: queue.SimpleQueue[Call | AgentEnd] = queue.SimpleQueue()
        self._calls: list[Call] = []
        self._lost: list[Call] = []  # whose clients had gone before their turn
        self._responses = self._tool_calls = 0
        self._waiting, self._own_seconds, self._since = 0, 0.0, time.monotonic()
        self._at_end: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def open(self, call: Call, said: bool) -> Call:
        """Add a request; return it, or the one that it repeats. Raises `RefusedRequestError` after the last one."""
        with self._lock:
            if self.closed:
                raise _episode_ended()
            for earlier in reversed(self._calls):
                if earlier.is_repeated_by(call, said):
                    earlier.connections += call.connections
                    return earlier
            self._lost = [lost for lost in self._lost if lost.digest != call.digest]
            self._calls.append(call)
            self.ignored.update(call.request.ignored)
            self._count(+1)
        self._events.put(call)
        return call

    def refuse(self, error: RefusedRequestError) -> None:
        """Record a request that cannot be read."""
        self.refused.append(str(error))

    def next(self) -> Call | AgentEnd:
        """Wait for the next request whose client is there, or for the end of the agent."""
        while True:
            event = self._events.get()
            if isinstance(event, AgentEnd):
                return event
            with self._lock:
                if not event.is_lost():
                    return event
                self._calls.remove(event)  # if it is sent again, it is new
                self._lost.append(event)
                self._answer(event, _episode_ended())

    def answer(self, call: Call, response: ChatResponse | RefusedRequestError) -> None:
        """Answer a request."""
        with self._lock:
            if isinstance(response, RefusedRequestError):
                self._answer(call, response)
                return
            self._responses += 1
            self._answer(call, write_completion(response, self._responses, self._tool_calls))
            self._tool_calls += len(response.tool_calls)

    def end(self, end: AgentEnd) -> None:
        """Report the end of the agent."""
        with self._lock:  # an agent in one thread has given up what is not answered now
            self._lost += [call for call in self._calls if call.answer is None and not call.beside_another]
        self._events.put(end)

    def given_up(self) -> list[Call]:
        """Return the requests whose clients have gone before the answer, and have not asked again."""
        with self._lock:
            return list(dict.fromkeys([*self._lost, *(call for call in self._calls if call.is_lost())]))

    def at_end(self, function: Callable[[], Any]) -> None:
        """Have a function called when the episode ends; at once if it has ended."""
        with self._lock:
            if not self.closed:
                self._at_end.append(function)
                return
        function()

    def close(self) -> None:
        """End the session: all requests that wait, and all that come, are answered by errors."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for call in self._calls:
                if call.answer is None:
                    self._answer(call, _episode_ended())
        for function in reversed(self._at_end):
            with contextlib.suppress(Exception):
                function()

    def own_seconds(self) -> float:
        """Return the seconds in which the agent did not wait for an answer."""
        with self._lock:
            return self._own_seconds + (0.0 if self._waiting else time.monotonic() - self._since)

    def _answer(self, call: Call, answer: dict[str, Any] | RefusedRequestError) -> None:
        call.answer = answer
        for other in self._calls:
            other.beside_another |= other.answer is None
        self._count(-1)
        call.answered.set()

    def _count(self, change: int) -> None:
        """Count the requests that wait; called before and after those in which the agent waits for none."""
        now = time.monotonic()
        if not self._waiting:
            self._own_seconds += now - self._since
        self._waiting += change
        self._since = now


class Endpoint:
    """The HTTP server of a process, and the sessions of its running episodes."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._sessions: dict[str, Session] = {}
        self._server = _Server((_LOOPBACK, 0), _Handler)
        self._server.endpoint = self
        self.base_url = f"http://{_LOOPBACK}:{self._server.server_port}/v1"
        bypass_proxies(os.environ)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="endpoint").start()

    def open_session(self) -> Session:
        """Return a new session."""
        session = Session()
        self._sessions[session.key] = session
        return session

    def close_session(self, session: Session) -> None:
        """End a session; its key is unknown from now on."""
        self._sessions.pop(session.key, None)
        session.close()

    def session_of(self, authorization: str | None) -> Session:
        """Return the session whose key a header contains. Raises `RefusedRequestError` if there is none."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise RefusedRequestError(
                "the API key is not the one of a running episode: use the client's api_key, in the episode it is for",
                code="invalid_api_key",
                status=401,
            )
        return session

    def refuse(self, authorization: str | None, error: RefusedRequestError) -> None:
        """Record a request that cannot be read with the session whose key a header contains, if there is one."""
        with contextlib.suppress(RefusedRequestError):
            self.session_of(authorization).refuse(error)


_endpoint: Endpoint | None = None
_endpoint_lock = threading.Lock()


def running_endpoint() -> Endpoint:
    """Return the endpoint of this process, started if there is none."""
    global _endpoint
    with _endpoint_lock:
        if _endpoint is None or _endpoint.process != os.getpid():  # a fork has no threads
            _endpoint = Endpoint()
        return _endpoint


def bypass_proxies(variables: Any) -> None:
    """Exempt loopback from proxies in environment variables, if they name any."""
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in variables):
        return
    for name in ("no_proxy", "NO_PROXY"):
        exempt = [host for host in variables.get(name, "").split(",") if host]
        variables[name] = ",".join([*exempt, *(host for host in (_LOOPBACK, "localhost") if host not in exempt)])


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    endpoint: Endpoint

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer looks up a name, which may take seconds
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has gone
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1
    server: _Server

    def do_GET(self) -> None:
        self._respond(self._models)

    def do_POST(self) -> None:
        self._respond(self._complete)

    def _respond(self, handle: Callable[[str], tuple[bytes, str]]) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        try:
            content, kind = handle(path)
        except RefusedRequestError as error:
            self._send(error.status, error.body(), "application/json")
        else:
            self._send(200, content, kind)

    def _models(self, path: str) -> tuple[bytes, str]:
        self.server.endpoint.session_of(self.headers.get("Authorization"))
        if path != "/v1/models" and not path.startswith("/v1/models/"):
            raise _unknown_path("GET", path)
        return models_body(path), "application/json"

    def _complete(self, path: str) -> tuple[bytes, str]:
        authorization = self.headers.get("Authorization")
        try:
            body = read_body(self.headers, self.rfile)  # first: clients read no answer before they have sent all
            session = self.server.endpoint.session_of(authorization)
            if path != "/v1/chat/completions":
                raise _unknown_path("POST", path)
            request = read_request(body)
        except RefusedRequestError as error:
            self.server.endpoint.refuse(authorization, error)
            raise
        retries, name = self.headers.get("x-stainless-retry-count", "0"), self.headers.get("Idempotency-Key")
        limit = _seconds(self.headers.get("x-stainless-read-timeout"))
        call = Call(request, hashlib.blake2b(body, digest_size=16).digest(), name, self.connection, limit)
        call = session.open(call, said=retries.isdecimal() and int(retries) > 0)
        call.answered.wait()
        self._delivers = call
        if isinstance(call.answer, RefusedRequestError):
            raise call.answer
        if request.stream:
            return event_stream(call.answer, request.include_usage), "text/event-stream"
        return completion_body(call.answer), "application/json"

    _delivers: Call | None = None

    def handle_expect_100(self) -> bool:
        """Ask for the body at once: the response is buffered."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _send(self, status: int, content: bytes, kind: str) -> None:
        call, self._delivers = self._delivers, None
        # Libraries share a client between episodes, and an open connection fails in another event loop.
        self.close_connection = True
        if _is_closed(self.connection):  # bytes to a client that has gone would seem to arrive
            return
        if call is not None:  # before the client can have it, and ask the same again
            call.delivered = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self.wfile.write(content)
            self.wfile.flush()
        except OSError:
            if call is not None:
                call.delivered = False
            raise

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _episode_ended() -> RefusedRequestError:
    return RefusedRequestError("the episode has ended: stop asking", code="episode_ended", status=404)


def _unknown_path(method: str, path: str) -> RefusedRequestError:
    remedy = "use POST /v1/chat/completions"
    if path.startswith("/v1/responses"):
        remedy += ", as libraries do that are set to chat completions instead of the Responses API"
    return RefusedRequestError(f"{method} {path} is not served: {remedy}", code="unknown_url", status=404)


def _seconds(text: str | None) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return float(text)
    return math.inf


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
