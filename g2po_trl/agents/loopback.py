"""An HTTP server on loopback, for the agents' endpoint and the viewer."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = "127.0.0.1"
MAX_STRANGERS = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # connections without a session
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        strangers = [one for one in self.connections if "session" not in (one.scope or ())]
        for oldest in sorted(strangers, key=lambda one: one.since)[:-MAX_STRANGERS]:
            oldest.transport.abort()


async def respond(send: Send, status: int, kind: str, content: bytes, header: tuple[str, str]) -> None:
    """Send a response."""
    fields = (("content-type", kind), ("content-length", str(len(content))), header)
    headers = [(name.encode(), value.encode()) for name, value in fields]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class LoopbackServer:
    """A server of an ASGI application on 127.0.0.1; with `port=0`, on a free port."""

    def __init__(self, application: Callable[..., Any], port: int = 0):
        self._socket = socket.create_server((LOOPBACK, port), backlog=512)
        self.server_port = self._socket.getsockname()[1]
        quiet = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
        plain = {"ws": "none", "loop": "asyncio", "lifespan": "off", "interface": "asgi3", "backlog": 128}
        self._server = Server(Config(application, http=_Connection, **plain, **quiet))

    def serve_forever(self) -> None:
        """Serve until `shutdown`, or in the main thread until an interrupt."""
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a thread that ends with the process."""
        self._thread = threading.Thread(target=self.serve_forever, daemon=True, name="loopback")
        self._thread.start()

    def shutdown(self) -> None:
        """End a server that was started, and its connections."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
