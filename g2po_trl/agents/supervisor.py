"""Run a program, and end all processes that it has started: `python -I -S supervisor.py LIMITS PROGRAM ARGUMENT…`.

LIMITS is a JSON object: `processes` is how many may run at once, `disk_bytes` what the files in `folder` may take. A
program beyond a limit is ended; the exit status is `OVER_LIMIT`, and the last line of stderr says why.

It ends them when the program ends, when it is terminated (SIGTERM), and when its standard input is closed, as by the
death of the process that started it. Its exit status is the program's.

On Linux, processes that leave the program's process group (`setsid`, daemons) become children of this one when their
parents end (`PR_SET_CHILD_SUBREAPER`). Elsewhere they stay: only the program's process group is ended.

This file is run by itself, so it imports only the standard library.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OVER_LIMIT = 125
LOOK_SECONDS, MAX_LOOK_SECONDS = 0.5, 10.0  # between two looks at a program's processes and files
LOOK_SHARE = 0.02  # of the time that looks may take


def main(limits: dict[str, Any], words: list[str]) -> None:
    """Run a program until it ends or this process is terminated, then end all its processes."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    exceeded: list[str] = []
    program = os.fork()
    if program == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            os.execvp(words[0], words)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(126)
    try:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        threading.Thread(target=_watch, args=(limits, exceeded), daemon=True).start()
        ended = None
        while ended != program:
            ended, status = os.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(program)
        if exceeded:
            print(f"\nLimitError: {exceeded[0]}", file=sys.stderr, flush=True)
            os._exit(OVER_LIMIT)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def end_all(program: int) -> None:
    """Kill the program's process group and all children; theirs become children in turn, until there are none."""
    while True:
        with contextlib.suppress(OSError):
            os.killpg(program, signal.SIGKILL)
        for child in _children():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:  # all that have ended, since a look at `/proc` takes long
                pass
        except ChildProcessError:
            return


def end_marked(variable: str) -> None:
    """Kill all processes that began with an environment variable, "NAME=value": a killed supervisor leaves them."""
    mark, seen = b"\0" + os.fsencode(variable) + b"\0", set()
    while found := [pid for pid in _parents() if pid != os.getpid() and mark in b"\0" + _environment(pid)]:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if seen.issuperset(found):  # they are killed, and about to end
            return
        seen.update(found)


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()
    return b""


def _descendants() -> list[int]:
    """Return all processes that this one is an ancestor of; none where there is no `/proc`."""
    parents = _parents()
    found, new = [], [os.getpid()]
    while new:
        found += new
        new = [child for child, parent in parents.items() if parent in new]
    return found[1:]


def _children() -> list[int]:
    return [child for child, parent in _parents().items() if parent == os.getpid()]


def _parents() -> dict[int, int]:
    """Return the parents of all processes; none where there is no `/proc`."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def _watch(limits: dict[str, Any], exceeded: list[str]) -> None:
    """End this process when the program exceeds a limit, and add why."""
    took = 0.0
    while True:
        time.sleep(min(max(LOOK_SECONDS, took / LOOK_SHARE), MAX_LOOK_SECONDS))
        begin = time.thread_time()
        number, size = len(_descendants()), disk_bytes(limits["folder"])
        took = time.thread_time() - begin
        if number > limits["processes"]:
            exceeded.append(f"it has {number} processes, more than {limits['processes']}")
        elif size > limits["disk_bytes"]:
            exceeded.append(f"it takes {size / 2**20:.0f} MiB of disk, more than {limits['disk_bytes'] / 2**20:.0f}")
        if exceeded:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def disk_bytes(folder: str) -> int:
    """Return what the files below a folder take on disk."""
    size = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(root, name)).st_blocks * 512
    return size


def _end_with_stdin() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
