"""A program that runs under a supervisor: its limits, its output, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from . import supervisor

_SUPERVISOR = [sys.executable, "-I", "-S", supervisor.__file__]
END_SECONDS = 5.0  # for all that a program started to end
MAX_OUTPUT_BYTES = 2**20  # of stdout, and of stderr; more loses its middle


class Program:
    """A running program. At the end of the context it is killed, with all processes that it has started.

    Args:
        words: the program and its arguments.
        variables: its environment variables.
        limits: see `supervisor`.
        folder: working folder of the program. `None`: the current one.
    """

    def __init__(
        self, words: list[str], variables: dict[str, str], limits: dict[str, Any], folder: Path | None = None
    ):
        require_program(words[0], variables, folder)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [*_SUPERVISOR, json.dumps(limits), *words]
        self._mark = f"EPISODE_FOLDER={limits['folder']}"
        self._process = subprocess.Popen(command, **pipes, env=variables, process_group=0, cwd=folder)
        self._outputs = [_Output(self._process.stdout), _Output(self._process.stderr)]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def wait(self, seconds: float | None) -> int | None:
        """Return the exit status; `None` if the program still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)

    def outputs(self) -> list[str]:
        """Return its stdout and its stderr."""
        return [output.text() for output in self._outputs]

    def end(self) -> None:
        """Kill it."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode < 0:  # the supervisor may have been killed too, as by `pkill -f` with the task
            supervisor.end_marked(self._mark)
        self._process.stdin.close()


def require_program(name: str, variables: dict[str, str], folder: Path | None = None) -> None:
    """Raise `FileNotFoundError` if there is no program of this name, or path relative to the folder."""
    path = Path(folder or ".", name) if os.sep in name else shutil.which(name, path=variables["PATH"])
    if path is None or not os.path.exists(path):
        raise FileNotFoundError(f"{name} is not found: give the program's path, or install it where training runs")
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        raise FileNotFoundError(f"{name} cannot be executed: run `chmod +x` on it, or write its interpreter before it")


class _Output:
    """Reads what a program writes, and keeps its beginning and end."""

    def __init__(self, pipe: Any):
        self._head, self._tail, self._omitted = bytearray(), bytearray(), 0
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: Any) -> None:
        half = MAX_OUTPUT_BYTES // 2
        with pipe:
            while chunk := pipe.read1(2**16):
                room = half - len(self._head)
                self._head += chunk[:room]
                self._tail += chunk[room:]
                if (surplus := len(self._tail) - half) > half:
                    del self._tail[:surplus]
                    self._omitted += surplus

    def text(self) -> str:
        """Return the text. All writers have ended, but outside of Linux a daemon may live: it is not waited for."""
        self._thread.join(1.0)
        omitted = f"\n[{self._omitted:,} bytes are left out]\n".encode() if self._omitted else b""
        return (bytes(self._head) + omitted + bytes(self._tail)).decode("utf-8", "replace")
