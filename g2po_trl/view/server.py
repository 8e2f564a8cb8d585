"""The viewer's server on loopback, which reads data on demand: runs may be large or still running.

Its address contains a random token, since other users of the machine can reach loopback, too.

The page asks for the version every POLL_SECONDS, and for the overview when it has changed.
"""

from __future__ import annotations

import hmac
import secrets
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from ..utils.json import to_json
from .data import Run
from .page import shell
from .sources import Sources, open_folder, version_of

POLL_SECONDS = 3  # between two questions of a page, see live.js


class Server(ThreadingHTTPServer):
    """The viewer's server. `asked`: time of a page's last request for the version, by the monotonic clock."""

    daemon_threads = True
    asked = float("-inf")
    token = ""

    @property
    def address(self) -> str:
        """The page's address with the token. Anyone who knows it can read the run."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


def make_server(sources: Sources, port: int = 0) -> Server:
    """Return a server on 127.0.0.1, started by `serve_forever`; with `port=0`, on a free port."""
    page, folders = shell().encode(), [source.folder for source in sources.sources]
    indexes = {source.folder: source.index for source in sources.sources if isinstance(source, Run)}  # read once

    def sources_now() -> Sources:
        now = Sources(*(open_folder(folder, live=True) for folder in folders))
        for source in now.sources:
            if isinstance(source, Run):
                source.index = indexes.setdefault(source.folder, source.index)
        return now

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            try:
                self.look_up()
            except ConnectionError:  # the browser closed the connection
                pass
            except Exception as error:  # e.g. a damaged file: the page shows the error, the server keeps running
                self.answer(500, f"{type(error).__name__}: {error}".encode("utf-8", "replace"), "text/plain")

        def look_up(self) -> None:
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
                self.answer(403, b"this page is for this machine alone", "text/plain")  # DNS rebinding
                return
            token, _, path = self.path.removeprefix("/").partition("/")
            if not hmac.compare_digest(token.encode(), self.server.token.encode()):
                self.answer(403, b"open the address that g2po printed, with its token", "text/plain")
            elif path == "":
                self.answer(200, page, "text/html; charset=utf-8")
            elif path == "overview":
                version = version_of(folders)  # read first: what changes meanwhile is asked for again
                overview = {"version": version, **sources_now().overview()}
                self.answer(200, to_json(overview).encode(), "application/json")
            elif path == "version":
                self.server.asked = time.monotonic()
                self.answer(200, to_json(version_of(folders)).encode(), "application/json")
            elif read := sources_now().pieces().get(unquote(path)):
                self.answer(200, to_json(read()).encode(), "application/json")
            else:
                self.answer(404, b"no such page", "text/plain")

        def answer(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = Server(("127.0.0.1", port), Handler)
    server.token = secrets.token_urlsafe(16)
    return server
