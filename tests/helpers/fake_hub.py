"""A Hub on loopback that takes commits and keeps their files, or answers with an error."""

import base64
import json
from contextlib import contextmanager
from fnmatch import fnmatch

from chat_server import scripted_server


@contextmanager
def fake_hub(status=200):
    def respond(path, text, headers):
        hub.requests.append(path)
        return (200, answer(path, text)) if status == 200 else (status, {"error": "refused"})

    def answer(path, text):
        if path == "/api/repos/create":
            return {"url": f"{hub.endpoint}/someone/{json.loads(text)['name']}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            request = json.loads(text)
            ignored = request.get("gitIgnore") or hub.files.get(".gitignore", b"").decode()
            return {"files": [decision(file["path"], ignored.split()) for file in request["files"]]}
        if "/commit/" in path:
            for entry in map(json.loads, text.splitlines()):
                if entry["key"] == "header":
                    hub.commits.append(entry["value"]["summary"])
                if entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            oid = f"{len(hub.commits):040d}"
            return {"commitUrl": f"{hub.endpoint}/someone/agent/commit/{oid}", "commitOid": oid}
        return {"id": "someone/agent", "siblings": [], "sha": "0" * 40, "name": "someone", "type": "user"}

    def decision(path, ignored):
        hit = any(fnmatch(part, line.rstrip("/")) for part in path.split("/") for line in ignored)
        return {"path": path, "uploadMode": "regular", "shouldIgnore": hit}

    with scripted_server(respond) as hub:
        hub.files, hub.commits, hub.requests = {}, [], []
        yield hub
