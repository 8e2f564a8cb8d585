"""One AppWorld server: a process on loopback, which is replaced if it is old, too large, unresponsive or dead.

AppWorld runs code of a model, and pins versions of libraries that conflict with those of g2po-trl. So it has its own
virtual environment and is never imported here: requests go over HTTP, with a key (see `keyed_server.py`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from g2po_trl.utils.options import require

_APP = "appworld.serve.environment:app"
_PROGRAM = Path(__file__).with_name("keyed_server.py")
_LAST_LINES = 2_000  # characters of the server's output in an error


@dataclass(frozen=True)
class Installation:
    """An installation of AppWorld, made by `python -m g2po_envs.appworld.setup`.

    Args:
        directory: folder with `venv` (the package appworld), `cache` (its apps) and `root` (its data).
    """

    directory: str

    def __post_init__(self):  # its processes run in another folder
        object.__setattr__(self, "directory", str(Path(self.directory).expanduser().absolute()))

    @property
    def python(self) -> Path:
        return Path(self.directory, "venv", "bin", "python")

    @property
    def root(self) -> Path:
        return Path(self.directory, "root")

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of its processes, without secrets of this process."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        cache = str(Path(self.directory, "cache"))
        # What code prints of a set must not depend on the server: a state is returned to by running its code again.
        same = {"PYTHONHASHSEED": "0"}
        return {**kept, **same, "HOME": cache, "APPWORLD_ROOT": str(self.root), "APPWORLD_CACHE": cache}

    def check(self) -> None:
        """Raise `G2POError` with a remedy if a part is missing."""
        for path, what in ((self.python, "virtual environment"), (self.root / "data" / "tasks", "data")):
            remedy = f"AppWorld's {what} is not at {path}, run `python -m g2po_envs.appworld.setup {self.directory}`"
            require(path.exists(), "directory", self.directory, remedy)

    def rows(self, dataset: str, difficulties: Collection[int] = ()) -> list[dict[str, str]]:
        """Return the tasks of a dataset, in the order of its file.

        Args:
            dataset: "train", "dev", "test_normal" or "test_challenge".
            difficulties: difficulties of the tasks, 1 to 3. Empty: all.

        Raises:
            G2POError: if the dataset does not exist, or no task has one of the difficulties.
        """
        path = self.root / "data" / "datasets" / f"{dataset}.txt"
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.txt"))) or "none"
        require(path.is_file(), "dataset", dataset, f"it is not at {path}; there are: {there}")
        ids = path.read_text().split()
        chosen = [task_id for task_id in ids if not difficulties or self._difficulty(task_id) in difficulties]
        remedy = f"no task of {dataset!r} has one, they are from 1 to 3"
        require(bool(chosen), "difficulties", list(difficulties), remedy)
        return [{"task_id": task_id} for task_id in chosen]

    def _difficulty(self, task_id: str) -> int:
        path = self.root / "data" / "tasks" / task_id / "ground_truth" / "metadata.json"
        return int(json.loads(path.read_text())["difficulty"])


class AppworldServerError(RuntimeError):
    """A server died, timed out, or rejected a call."""


class AppworldTimeoutError(AppworldServerError):
    """A server timed out."""


class AppworldServer:
    """A server process for one world at a time.

    Args:
        start_timeout, call_timeout: maximum seconds to start, and to answer a call without its own timeout.
        max_worlds, max_memory: number of worlds and of bytes after which `fresh` is False, since servers grow. On
            Linux, an allocation beyond twice `max_memory` raises MemoryError in any world.
    """

    def __init__(
        self,
        installation: Installation,
        start_timeout: float = 60.0,
        call_timeout: float = 45.0,
        max_worlds: int = 50,
        max_memory: float = 2e9,
    ):
        self.call_timeout, self.max_worlds, self.max_memory = call_timeout, max_worlds, max_memory
        self.worlds = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the server)
        # A root of its own: AppWorld keeps a world's state in a folder named after the task, and members of a group
        # play the same one at the same time.
        self._root = tempfile.TemporaryDirectory(prefix="appworld-", ignore_cleanup_errors=True)
        Path(self._root.name, "data").symlink_to(installation.root / "data")
        with socket.socket() as bound:
            # The server is handed the socket itself. A port that was only known to be free could be another's by the
            # time it listens, and answers would come from there.
            bound.bind(("127.0.0.1", 0))
            self.port = bound.getsockname()[1]
            self.process = subprocess.Popen(
                [str(installation.python), "-P", str(_PROGRAM), _APP, "--fd", str(bound.fileno())],
                pass_fds=[bound.fileno()],
                cwd=self._root.name,
                env={**installation.variables, "APPWORLD_ROOT": self._root.name},
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        # Not as an argument or a variable: code in an episode could read those of another episode's server.
        self._key = secrets.token_urlsafe()
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:  # it has died: connecting will tell
            stdin.write(f"{self._key}\n".encode())
        self._finalizer = weakref.finalize(self, _end, self.process, self._root)
        if hasattr(resource, "prlimit"):
            with contextlib.suppress(ProcessLookupError):  # it has died: connecting will tell
                resource.prlimit(self.process.pid, resource.RLIMIT_AS, (2 * int(max_memory),) * 2)
        # One connection for all calls, so that nobody who gets the port after the server's death is ever asked.
        self._connection = self._connect(start_timeout)

    @property
    def memory(self) -> int:
        """Return the resident bytes of the server and its child processes."""
        try:
            process = psutil.Process(self.process.pid)
            return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    @property
    def fresh(self) -> bool:
        """Whether the server may open another world."""
        return self.process.poll() is None and self.worlds < self.max_worlds and self.memory < self.max_memory

    def call(self, name: str, timeout: float | None = None, /, **arguments: Any) -> Any:
        """Call one of the server's functions over HTTP and return its output.

        Args:
            name: name of the function.
            timeout: seconds to wait. `None`: `call_timeout`.
            **arguments: arguments of the function.

        Raises:
            AppworldTimeoutError: if it times out; the server is then killed.
            AppworldServerError: if it has died or rejects the call.
        """
        timeout = self.call_timeout if timeout is None else timeout
        try:
            if self._connection.sock is None:
                raise ConnectionError("the connection is closed")
            self._connection.sock.settimeout(timeout)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            body = json.dumps(arguments)
            self._connection.request("POST", f"/{name}", body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except TimeoutError as error:
            self.close()
            raise AppworldTimeoutError(f"{name} took more than {timeout:g} s. {self._last_output()}") from error
        except (OSError, http.client.HTTPException) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close a moment before its end is seen
                self.process.wait(1.0)
            how = _how_it_ended(self.process)
            self.close()
            raise AppworldServerError(f"{name} lost the server ({how}): {error!r}. {self._last_output()}") from error
        if answer.status != 200:
            raise AppworldServerError(f"{name} was refused ({answer.status}): {self._last_output()}")
        return json.loads(content)["output"]

    def close(self) -> None:
        """Kill the process; it has no state to save."""
        self._connection.close()
        self._finalizer()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        """Wait until the server accepts connections."""
        deadline = time.monotonic() + timeout
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(ConnectionRefusedError):
                connection.connect()
                connection.auto_open = 0  # never another connection
                return connection
            time.sleep(0.05)
        how = "did not listen in time" if self.process.poll() is None else _how_it_ended(self.process)
        self._finalizer()
        raise AppworldServerError(f"the AppWorld server {how}: {self._last_output()}")

    def _last_output(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - _LAST_LINES))
            return f"its last output:\n{self._output.read().decode(errors='replace')}"
        return "it left no output"


def _end(process: subprocess.Popen, root: tempfile.TemporaryDirectory) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
    root.cleanup()


def _how_it_ended(process: subprocess.Popen) -> str:
    status = process.poll()
    if status is None:
        return "is running"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def evaluation(result: Mapping[str, Any]) -> tuple[bool, float]:
    """Return the success, and the share of the task's tests that passed."""
    passed, failed = len(result.get("passes") or ()), len(result.get("failures") or ())
    return bool(result["success"]), passed / max(1, passed + failed)
