"""Runs a program, and ends with it all that it started: `python -I -S supervisor.py PROGRAM ARGUMENT…`.

It ends them when the program ends, when it is terminated (SIGTERM), and when its standard input is closed, as by the
death of the process that started it. Its exit status is the program's.

On Linux, processes that leave the program's process group (`setsid`, daemons) become children of this one when their
parents end (`PR_SET_CHILD_SUBREAPER`). Elsewhere they stay: only the program's process group is ended.

This file is run by itself, so it imports the standard library alone.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(words: list[str]) -> None:
    """Run a program until it ends or this process is told to end, then end all that is left of it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
        ended = None
        while ended != program:
            ended, status = os.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(program)
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
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Return the children of this process; none where there is no `/proc`."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _end_with_stdin() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
