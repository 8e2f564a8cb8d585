"""A worker's temporary folder, and the removal of files and processes that a worker leaves behind.

The folder is the TMPDIR of the worker and of all programs that an environment starts, which identifies programs that
left the worker's process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence


def clear(folders: Sequence[str]) -> None:
    """Remove folders of workers, and kill other processes whose TMPDIR is one of them."""
    import psutil  # not at a worker's start

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
