"""A worker's temporary folder, and what the worker leaves behind there and among the processes.

The folder is the worker's TMPDIR, and so of everything an environment starts: that is how programs are found that
have left the worker's process group. Who holds the folder's lock is alive; what is left when all were killed at once
is swept later.
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
    """A folder, and a descriptor: as long as a process has it open, nobody sweeps the folder."""
    import fcntl

    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # just being swept
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks, where nothing is swept either
            pass
        if os.path.isdir(folder):
            return folder, descriptor
        os.close(descriptor)


def sweep() -> None:
    """Remove folders whose workers and trainers were killed, and end what these have left running."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear([str(folder)])


def clear(folders: Sequence[str]) -> None:
    """Remove the folders of workers, and kill whatever else has one of them as its TMPDIR, but for this process."""
    import psutil

    for _ in range(3):  # what is killed may just have started another
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
