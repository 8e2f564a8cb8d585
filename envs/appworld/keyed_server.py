"""AppWorld's server behind a key: the program that AppWorld's own Python runs, as `… module:app --fd NUMBER`.

AppWorld's app answers every request, including those of web pages, and executes code. Here, a request reaches it only
if it has the key, which is the first line of stdin, and is addressed to this machine. The file imports nothing from
this package.
"""

from __future__ import annotations

import hmac
import importlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

HOSTS = (b"127.0.0.1", b"localhost")
KEEP_ALIVE = 10**6  # seconds the connection may be silent: a model may think for long


class Keyed:
    """An ASGI app that rejects requests without the key, or for another host, with status 403 and no headers."""

    def __init__(self, app: Callable[..., Awaitable[None]], key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(dict(scope["headers"])):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"this server is for one process alone\n"})
        else:
            await send({"type": "websocket.close"})

    def _is_allowed(self, headers: Mapping[bytes, bytes]) -> bool:
        host = headers.get(b"host", b"").rsplit(b":", 1)[0]  # a page may have its own name for this address
        return host in HOSTS and hmac.compare_digest(headers.get(b"authorization", b""), self.expected)


def main() -> None:
    key = sys.stdin.readline().strip()
    import uvicorn

    module, _, name = sys.argv[1].partition(":")
    app = getattr(importlib.import_module(module), name)
    uvicorn.run(Keyed(app, key), fd=int(sys.argv[3]), timeout_keep_alive=KEEP_ALIVE)


if __name__ == "__main__":
    main()
