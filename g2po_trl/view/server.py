"""The viewer's server on loopback, which reads data on demand: runs may be large or still running.

Its address contains a random token, since other users of the machine can reach loopback, too.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Any

from ..agents.loopback import LOOPBACK, LoopbackServer, Receive, Send, respond
from ..utils.json import to_json
from .page import shell
from .sources import Sources, open_folder, version_of

POLL_SECONDS = 3  # after which a page asks for the version again, see live.js


class Server(LoopbackServer):
    """The viewer's server."""

    def __init__(self, sources: Sources, port: int = 0):
        super().__init__(self._respond, port)
        self.token = secrets.token_urlsafe(16)
        self._page, self._folders = shell().encode(), [source.folder for source in sources.sources]

    @property
    def address(self) -> str:
        """The page's address with the token. Anyone who knows it can read the run."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    async def _respond(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        try:
            status, kind, content = await asyncio.to_thread(self._look_up, scope)
        except Exception as error:  # e.g. a damaged file: the page shows the error, the server keeps running
            status, kind, content = 500, "text/plain", f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        await respond(send, status, kind, content, ("referrer-policy", "no-referrer"))

    def _look_up(self, scope: dict[str, Any]) -> tuple[int, str, bytes]:
        """Return status, content type and content of an answer."""
        host = dict(scope["headers"]).get(b"host", b"").rsplit(b":", 1)[0]
        token, _, path = scope["path"].removeprefix("/").partition("/")
        if host not in (LOOPBACK.encode(), b"localhost"):
            return 403, "text/plain", b"this page is for this machine alone"  # DNS rebinding
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return 403, "text/plain", b"open the address that g2po printed, with its token"
        if path == "":
            return 200, "text/html; charset=utf-8", self._page
        version = version_of(self._folders)  # read first: what changes meanwhile is asked for again
        if path == "version":
            return 200, "application/json", to_json(version).encode()
        sources = Sources(*(open_folder(folder, live=True) for folder in self._folders))
        overview = {"overview": lambda: {"version": version, **sources.overview()}}
        if read := {**sources.pieces(), **overview}.get(path):
            return 200, "application/json", to_json(read()).encode()
        return 404, "text/plain", b"no such page"
