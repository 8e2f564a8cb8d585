"""The HTTP endpoint on loopback that agents ask. Each episode of an agent is a session with its own key.

There is one in a worker process, started when the first agent needs it. The key, which cannot be guessed, is checked
before the body is read. The connection is closed after each answer: in another event loop, an open one would fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from .dialects import DIALECTS, KEY_HEADERS, ROUTES
from .dialects.request import AgentRequest, Completion, RefusedRequestError, to_stream
from .loopback import LOOPBACK, LoopbackServer, Receive, Send, respond
from .session import Session

MAX_BODY_BYTES = 2**26
LINGER_SECONDS = 2.0  # for a client to send the rest of a request that is refused unread


class Endpoint(LoopbackServer):
    """The HTTP server of a process, and the sessions of its running episodes."""

    def __init__(self) -> None:
        super().__init__(self._respond)
        self._sessions: dict[str, Session] = {}
        self.base_url = f"http://{LOOPBACK}:{self.server_port}/v1"
        if any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in os.environ):
            for name in ("no_proxy", "NO_PROXY"):
                os.environ[name] = ",".join(filter(None, [os.environ.get(name), LOOPBACK, "localhost"]))
        self.start()

    def open_session(self, **limits: Any) -> Session:
        """Return a new session with these limits, see `Session`."""
        session = Session(**limits)
        return self._sessions.setdefault(session.key, session)

    def close_session(self, session: Session) -> None:
        """End a session; its key is unknown from now on."""
        self._sessions.pop(session.key, None)
        session.close()

    def session_of(self, headers: Mapping[str, str]) -> Session:
        """Return the session whose key the headers contain. Raises `RefusedRequestError` if there is none."""
        for name, scheme in KEY_HEADERS:
            if session := self._sessions.get(headers.get(name, "").removeprefix(scheme).strip()):
                return session
        why = "the API key is not the one of a running episode: use the client's api_key, in the episode it is for"
        raise RefusedRequestError(why, code="invalid_api_key", status=401)

    async def _respond(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        route = f"{scope['method']} {scope['path'].rstrip('/')}"
        dialect, read = next((ROUTES[one] for one in ROUTES if fnmatchcase(route, one)), (DIALECTS[0], None))
        session = asked = body = None
        try:
            session = scope["session"] = self.session_of(headers)
            if read is None:
                raise RefusedRequestError(f"{route} is not served: use {', '.join(ROUTES)}", None, "unknown_url", 404)
            body = await _body(receive)
            answer = read(body)
            asked = answer.whole(session.answered) if isinstance(answer, AgentRequest) else answer
        except RefusedRequestError as error:
            answer = error
            if session is not None:
                session.refuse(str(error))
        if isinstance(asked, AgentRequest):
            is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
            call = session.open(asked, hashlib.blake2b(route.encode() + body).digest(), is_retry)
            answered, left = asyncio.wrap_future(call.answer), asyncio.ensure_future(receive())
            await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
            call.clients -= 1
            if left.done():  # the client has left
                return
            left.cancel()
            call.is_delivered, answer = True, answered.result()
        status, kind = 200, "application/json"
        if isinstance(answer, RefusedRequestError):
            status, answer = answer.status, dialect.error(answer)
        elif isinstance(answer, Completion):
            answer = dialect.answer(answer, asked)
            kind = "text/event-stream" if asked.stream else kind
        content = json.dumps(answer) if kind == "application/json" else to_stream(dialect.events(answer))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):  # with unread bytes, closing would take back the answer
                while body is None and (await receive()).get("more_body"):
                    pass
        await respond(send, status, kind, content.encode(), ("connection", "close"))


async def _body(receive: Receive) -> bytes:
    body, part = bytearray(), {"more_body": True}
    while part["more_body"]:
        part = await receive()
        if part["type"] == "http.disconnect":
            raise RefusedRequestError("the body is cut off: send all of it, as valid HTTP/1.1")
        body += part["body"]
        if len(body) > MAX_BODY_BYTES:
            raise RefusedRequestError(f"the body has more than {MAX_BODY_BYTES:,} bytes: shorten it", status=413)
    return bytes(body)


_endpoint_of = functools.cache(lambda process: Endpoint())
_endpoint_lock = threading.Lock()


def running_endpoint() -> Endpoint:
    """Return the endpoint of this process, started if there is none: a fork has no threads."""
    with _endpoint_lock:
        return _endpoint_of(os.getpid())
