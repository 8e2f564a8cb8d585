"""A program with limits, whose processes all end with it.

`Program` runs this file as the program's parent, `python -I program.py LIMITS PROGRAM ARGUMENT…`. It ends all
processes when the program ends or exceeds a limit (then the exit status is `OVER_LIMIT`, and the last line of stderr
says why), when it is terminated (SIGTERM), and when its standard input is closed, as by the death of the process that
started it. On Linux, also those that leave the program's process group (`setsid`, daemons): they become its children
when their parents end (`PR_SET_CHILD_SUBREAPER`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OVER_LIMIT = 125
LOOK_SECONDS, MAX_LOOK_SECONDS = 0.5, 10.0  # between two looks at a program's processes and files
LOOK_SHARE = 0.02  # of the time that looks may take
END_SECONDS = 5.0  # for all that a program started to end
MAX_OUTPUT_BYTES = 2**20  # of stdout, and of stderr; more loses its middle


class Program:
    """A running program, until it is closed.

    Args:
        words: the program and its arguments.
        variables: its environment variables.
        limits: number of `processes` at once, and `disk_bytes` of the files in `folder`.
        folder: working folder of the program. `None`: the current one.
    """

    def __init__(self, words: list[str], variables: dict[str, str], limits: dict[str, Any], folder: Path | None):
        require_program(words[0], variables, folder)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-I", __file__, json.dumps(limits), *words]
        self._folder = limits["folder"]
        self._process = subprocess.Popen(command, **pipes, env=variables, process_group=0, cwd=folder)
        self._outputs = [_Output(self._process.stdout), _Output(self._process.stderr)]

    def wait(self, seconds: float | None) -> int | None:
        """Return the exit status; `None` if the program still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)

    def outputs(self) -> list[str]:
        """Return its stdout and its stderr."""
        return [output.text() for output in self._outputs]

    def close(self) -> None:
        """Kill it, with all processes that it has started."""
        self._process.terminate()
        if self.wait(END_SECONDS) is None:
            self._process.kill()
            self._process.wait()
        while self._process.returncode < 0:  # its parent was killed, as by `pkill -f`
            running, place = psutil.process_iter(["environ"]), ("EPISODE_FOLDER", self._folder)
            if not (left := [one for one in running if place in (one.info["environ"] or {}).items()]):
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, END_SECONDS)
        self._process.stdin.close()


def require_program(name: str, variables: dict[str, str], folder: Path | None = None) -> None:
    """Raise `FileNotFoundError` if there is no program of this name, or path relative to the folder."""
    path = Path(folder or ".", name) if os.sep in name else shutil.which(name, path=variables["PATH"])
    if path is None or os.path.isdir(path) or not os.access(path, os.X_OK):
        remedy = "give the path of an executable file (`chmod +x`), or install it where training runs"
        raise FileNotFoundError(f"{name} is not a program: {remedy}")


class _Output(threading.Thread):
    """Reads what a program writes, and keeps its beginning and end."""

    def __init__(self, pipe: Any):
        super().__init__(daemon=True)
        self._pipe, self._head, self._tail, self._size = pipe, b"", b"", 0
        self.start()

    def run(self) -> None:
        half = MAX_OUTPUT_BYTES // 2
        with self._pipe as pipe:
            while chunk := pipe.read1(2**16):
                room = half - len(self._head)
                self._head += chunk[:room]
                self._tail = (self._tail + chunk[room:])[-half:]
                self._size += len(chunk)

    def text(self) -> str:
        self.join(1.0)  # outside of Linux a daemon may live: it is not waited for
        omitted = self._size - len(self._head) - len(self._tail)
        middle = f"\n[{omitted:,} bytes are left out]\n".encode() if omitted else b""
        return (self._head + middle + self._tail).decode("utf-8", "replace")


def main(limits: dict[str, Any], words: list[str]) -> None:
    """Run a program until it ends or this process is terminated, then end all its processes."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    exceeded, dies_with_this = [], partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    started = subprocess.Popen(words, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=dies_with_this)
    program = started.pid
    try:
        threading.Thread(target=_watch, args=(limits, exceeded), daemon=True).start()
        while (ended := os.wait())[0] != program:
            pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all(program)
        if exceeded:
            print(f"\nLimitError: {exceeded[0]}", file=sys.stderr, flush=True)
            os._exit(OVER_LIMIT)
    status = os.waitstatus_to_exitcode(ended[1])
    os._exit(status if status >= 0 else 128 - status)  # as shells tell which signal has killed it


def _end_all(program: int) -> None:
    """Kill the program's process group and all children; theirs become children in turn, until there are none."""
    while True:
        with contextlib.suppress(OSError):
            os.killpg(program, signal.SIGKILL)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                child.kill()
        try:
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:  # all that have ended, since a look at all processes takes long
                pass
        except ChildProcessError:
            return


def _watch(limits: dict[str, Any], exceeded: list[str]) -> None:
    """End this process when the program exceeds a limit, adding why, or when standard input is closed."""
    pause = LOOK_SECONDS
    while not exceeded and not select.select([0], [], [], pause)[0]:
        begin = time.thread_time()
        number, size = len(psutil.Process().children(recursive=True)), disk_bytes(limits["folder"])
        pause = min(max(LOOK_SECONDS, (time.thread_time() - begin) / LOOK_SHARE), MAX_LOOK_SECONDS)
        if number > limits["processes"]:
            exceeded.append(f"it has {number} processes, more than {limits['processes']}")
        elif size > limits["disk_bytes"]:
            exceeded.append(f"it takes {size / 2**20:.0f} MiB of disk, more than {limits['disk_bytes'] / 2**20:.0f}")
    os.kill(os.getpid(), signal.SIGTERM)


def disk_bytes(folder: str) -> int:
    """Return what the files below a folder take on disk."""
    size = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(root, name)).st_blocks * 512
    return size


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
