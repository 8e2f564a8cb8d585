"""Stands in for AppWorld's server where AppWorld is not installed: the same calls, of which `execute` runs Python."""

import contextlib
import io
import json
import signal
import socket
import sys
from http.server import HTTPServer
from pathlib import Path

from chat_server import Handler

WORLD = {"limit": 1}


def initialize(task_id, timeout_seconds, **_):
    WORLD.update(limit=timeout_seconds)
    person = dict.fromkeys(("first_name", "last_name", "email", "phone_number"), "x")
    return {"instruction": task_id, "supervisor": person, "datetime": "now"}


def execute(code, **_):
    def late(*_):
        raise TimeoutError(f"Execution timed out after {WORLD['limit']} seconds.")

    printed = io.StringIO()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(WORLD["limit"])
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, WORLD)
    except Exception as error:
        return f"Execution failed. Traceback:\n{error!r}"
    finally:
        signal.alarm(0)
    return printed.getvalue() or "Execution successful."


FUNCTIONS = {
    "initialize": initialize,
    "execute": execute,
    "task_completed": lambda **_: "done" in WORLD,
    "evaluate": lambda **_: {"success": True, "passes": [1], "failures": []},
}


class Server(HTTPServer):
    answer_headers = {}

    def respond(self, path, text, headers):
        return 200, {"output": FUNCTIONS[path[1:]](**json.loads(text))}


def install(directory: Path) -> None:
    (directory / "venv" / "bin").mkdir(parents=True)
    (directory / "root" / "data" / "tasks").mkdir(parents=True)
    python = directory / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    python.chmod(0o755)


if __name__ == "__main__":
    Handler.protocol_version = "HTTP/1.1"
    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # another may have the port after it
    server.server_activate()
    server.serve_forever()
