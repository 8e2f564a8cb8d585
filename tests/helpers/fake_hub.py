"""A Hub on loopback that takes commits and keeps their files, or answers with an error."""

import base64
import json
import threading
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub(ThreadingHTTPServer):
    def __init__(self, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.files, self.commits, self.requests = status, {}, [], []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        hub = self.server
        hub.requests.append(self.path)
        if hub.status != 200:
            return self.answer({"error": "refused"}, hub.status)
        self.answer({"id": "someone/agent", "siblings": [], "sha": "0" * 40, "name": "someone", "type": "user"})

    def do_POST(self):
        hub = self.server
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        hub.requests.append(self.path)
        if hub.status != 200:
            return self.answer({"error": "refused"}, hub.status)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{hub.endpoint}/someone/{json.loads(body)['name']}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            request = json.loads(body)
            listed = request.get("gitIgnore") or hub.files.get(".gitignore", b"").decode()
            ignored = [line.rstrip("/") for line in listed.split()]
            return self.answer(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "regular",
                            "shouldIgnore": any(
                                fnmatch(part, name) for part in file["path"].split("/") for name in ignored
                            ),
                        }
                        for file in request["files"]
                    ]
                }
            )
        if "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "header":
                    hub.commits.append(entry["value"]["summary"])
                if entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            oid = f"{len(hub.commits):040d}"
            return self.answer({"commitUrl": f"{hub.endpoint}/someone/agent/commit/{oid}", "commitOid": oid})
        self.answer({"error": f"unknown path {self.path}"}, 404)


@contextmanager
def fake_hub(status=200):
    hub = FakeHub(status)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
