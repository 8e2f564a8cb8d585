"""The HTTP endpoint on loopback that agents ask. Each episode of an agent is a session with its own key.

There is one endpoint in a worker process, started when the first agent needs it. Sessions cannot be reached without
their keys, which cannot be guessed. A client without one costs little: its key is checked before its body is read, and
its data are limited in time and size. The connection is closed after each answer, since libraries share a
client between episodes, and an open connection fails in another event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import socketserver
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import h11

from .dialects import DIALECTS, ROUTES
from .dialects.request import AgentRequest, Completion, RefusedRequestError
from .session import CONTINUE, Call, Session

_LOOPBACK = "127.0.0.1"
MAX_HEAD_BYTES = 2**16
MAX_BODY_BYTES = 2**26  # also after decompression
HEAD_SECONDS, BODY_SECONDS, SEND_SECONDS = 10.0, 60.0, 60.0
LINGER_SECONDS = 2.0  # for a client to send the rest of a refused request: most read no answer before they have
OF_LIMIT = 0.8  # after which a client may have given up: its time runs from before a request is read here
MAX_STRANGERS, STRANGER_SECONDS = 128, 1.0  # connections without a key yet, and how long one has at least
_CHUNK = 2**16
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Endpoint:
    """The HTTP server of a process, and the sessions of its running episodes."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._sessions: dict[str, Session] = {}
        self._server = _Server((_LOOPBACK, 0), _Connection)
        self._server.endpoint = self
        self.base_url = f"http://{_LOOPBACK}:{self._server.server_address[1]}/v1"
        bypass_proxies(os.environ)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="endpoint").start()

    def open_session(self, max_requests: int | None = None) -> Session:
        session = Session(max_requests)
        self._sessions[session.key] = session
        return session

    def close_session(self, session: Session) -> None:
        """End a session; its key is unknown from now on."""
        self._sessions.pop(session.key, None)
        session.close()

    def session_of(self, headers: Mapping[str, str]) -> Session:
        """Return the session whose key the headers contain. Raises `RefusedRequestError` if there is none."""
        scheme, _, bearer = headers.get("authorization", "").strip().partition(" ")
        for key in (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
            if (session := self._sessions.get(key.strip())) is not None:
                return session
        raise RefusedRequestError(
            "the API key is not the one of a running episode: use the client's api_key, in the episode it is for",
            code="invalid_api_key",
            status=401,
        )


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


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    endpoint: Endpoint

    def __init__(self, *args: Any):
        self._strangers: dict[socket.socket, float] = {}  # since when, the oldest first
        self._change = threading.Condition()
        super().__init__(*args)

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Start a thread for a connection. Beyond the limit, the oldest connection without a key ends for it."""
        with self._change:
            while len(self._strangers) >= MAX_STRANGERS:
                oldest, since = next(iter(self._strangers.items()))
                if (left := since + STRANGER_SECONDS - time.monotonic()) > 0:
                    self._change.wait(left)
                    continue
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[request] = time.monotonic()
        super().process_request(request, client_address)

    def knows(self, request: socket.socket) -> None:
        """Note that a connection has shown a key, or is closed."""
        with self._change:
            if self._strangers.pop(request, None) is not None:
                self._change.notify()

    def shutdown_request(self, request: socket.socket) -> None:
        self.knows(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that has gone
            super().handle_error(request, client_address)


class _Connection(socketserver.BaseRequestHandler):
    """One connection, on which one request is answered."""

    server: _Server

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._dialect, self._session = DIALECTS[0], None
        try:
            asked = self._read()
        except (h11.RemoteProtocolError, TimeoutError, RefusedRequestError) as error:
            refusal = _refusal(error)
            if self._session is not None:
                self._session.refuse(str(refusal))
            self._send(refusal)
            self._discard_rest()
            return
        self.request.settimeout(None)
        if isinstance(asked, Call):
            self._serve(asked)
        elif asked is not None:
            self._send(asked)

    def _serve(self, call: Call) -> None:
        request = call.request
        try:
            call = self._session.open(call)
        except RefusedRequestError as error:
            self._send(error)
            return
        call.answered.wait()
        if not self._session.delivers(call, self.request):
            return
        try:
            self._send(call.answer, request)
        except OSError:
            call.delivered = False

    def _read(self) -> Call | bytes | None:
        """Return the call that a client makes, or the answer to another request; `None`: it has closed."""
        self._deadline = time.monotonic() + HEAD_SECONDS
        head = self._next()
        if not isinstance(head, h11.Request):
            return None
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        route = f"{head.method.decode()} {head.target.decode().partition('?')[0].rstrip('/')}"
        self._dialect, read = ROUTES.get(route, (self._dialect, None))
        self._session = self.server.endpoint.session_of(headers)
        self.server.knows(self.request)
        if read is None:
            raise _unknown_path(route)
        body = self._body(headers)
        asked = read(body, headers)
        if isinstance(asked, bytes):
            return asked
        digest, name = hashlib.blake2b(route.encode() + body).digest(), headers.get("idempotency-key")
        is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        limit = headers.get("x-stainless-read-timeout") or headers.get("x-stainless-timeout")  # of Python, of Node
        ends = time.monotonic() + OF_LIMIT * _seconds(limit)
        return Call(asked, digest, name, is_retry, [self.request], ends)

    def _body(self, headers: Mapping[str, str]) -> bytes:
        """Return the whole body of a request, decompressed."""
        self._deadline = time.monotonic() + BODY_SECONDS
        if int(headers.get("content-length", 0)) > MAX_BODY_BYTES:
            raise _too_large(f"{int(headers['content-length']):,} bytes")
        if self._http.they_are_waiting_for_100_continue:
            self.request.sendall(CONTINUE)
        body = bytearray()
        while isinstance(part := self._next(), h11.Data):
            body += part.data
            if len(body) > MAX_BODY_BYTES:
                raise _too_large(f"more than {MAX_BODY_BYTES:,} bytes")
        for encoding in reversed([one.strip().lower() for one in headers.get("content-encoding", "").split(",")]):
            body = body if encoding in ("", "identity") else _decompressed(body, encoding)
        return bytes(body)

    def _next(self) -> Any:
        """Return h11's next event, from what the client sends until the deadline."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self.request.settimeout(max(0.001, self._deadline - time.monotonic()))
            self._http.receive_data(self.request.recv(_CHUNK))
        return event

    def _send(self, answer: bytes | Completion | RefusedRequestError, request: AgentRequest | None = None) -> None:
        status, kind = 200, "application/json"
        if isinstance(answer, RefusedRequestError):
            status, answer = answer.status, self._dialect.error(answer)
        elif isinstance(answer, Completion):
            if request.stream:
                answer, kind = self._dialect.stream(answer, request), "text/event-stream"
            else:
                answer = self._dialect.answer(answer, request)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}"]
        lines += [f"Content-Length: {len(answer)}", "Connection: close", "", ""]
        self.request.settimeout(SEND_SECONDS)
        self.request.sendall("\r\n".join(lines).encode() + answer)

    def _discard_rest(self) -> None:
        """Read what a client still sends, for a moment: with unread bytes, closing would take back the answer."""
        self.request.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            self.request.settimeout(left)
            if not self.request.recv(_CHUNK):
                return


def _refusal(error: Exception) -> RefusedRequestError:
    if isinstance(error, RefusedRequestError):
        return error
    if isinstance(error, TimeoutError):
        return RefusedRequestError("the request took too long to arrive: send it at once", status=408)
    message = f"the request cannot be read ({error}): send valid HTTP/1.1"
    return RefusedRequestError(message, status=error.error_status_hint)


def _too_large(how: str) -> RefusedRequestError:
    return RefusedRequestError(f"the body has {how}, more than {MAX_BODY_BYTES:,}: shorten the messages", status=413)


def _decompressed(body: bytes, encoding: str) -> bytes:
    if encoding not in _WINDOWS:
        remedy = f"send it plain, or compressed by {', '.join(_WINDOWS)}"
        raise RefusedRequestError(f"Content-Encoding is {encoding!r}: {remedy}", status=415)
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    raw = encoding == "deflate" and not has_header  # some clients leave the header out
    decompress = zlib.decompressobj(-15 if raw else _WINDOWS[encoding])
    try:
        plain = decompress.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise RefusedRequestError(f"the body is not compressed by {encoding} ({error}): send it plain") from error
    if len(plain) > MAX_BODY_BYTES:
        raise _too_large(f"more than {MAX_BODY_BYTES:,} bytes without compression")
    if not decompress.eof:
        raise RefusedRequestError(f"the body, compressed by {encoding}, is cut off: send all of it")
    return plain


def _unknown_path(route: str) -> RefusedRequestError:
    return RefusedRequestError(f"{route} is not served: use {', '.join(ROUTES)}", code="unknown_url", status=404)


def _seconds(text: str | None) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.inf
