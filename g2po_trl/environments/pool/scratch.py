"""A worker's temporary folder, and the removal of files and processes that a worker leaves behind.

The folder is the TMPDIR of the worker and of all programs that an environment starts, which identifies programs that
left the worker's process group. A running worker holds a lock on its folder; folders without a lock are swept when the
next pool starts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

PREFIX = "g2po-scratch-"


def make_scratch() -> tuple[str, int]:
    """Return a new folder and a descriptor that locks it against `sweep` while it is open."""
    import fcntl

    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # `sweep` holds the lock
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks, where `sweep` removes nothing
            pass
        if os.path.isdir(folder):
            return folder, descriptor
        os.close(descriptor)


def sweep() -> None:
    """Remove folders of killed workers, and kill the processes they left running."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear([str(folder)])


def clear(folders: Sequence[str]) -> None:
    """Remove folders of workers, and kill other processes whose TMPDIR is one of them."""
    import psutil

    for _ in range(3):  # a killed process may have started another one
        found = False
        for pid in psutil.pids() if folders else ():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if pid != os.getpid() and process.environ().get("TMPDIR") in folders:
                    process.kill()
                    found = True
        if not found:
            break
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
