"""A worker's temporary folder, and the removal of files and processes that a worker leaves behind.

It is the TMPDIR of the worker and, or one below it, of its programs: so are those found that left its process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def clear(folders: Sequence[str]) -> None:
    """Remove folders of workers, and kill other processes whose TMPDIR is one of them, or below."""
    import psutil  # not at a worker's start

    above = {os.path.realpath(folder) for folder in folders}
    for pid in psutil.pids() if folders else ():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            temporary = os.path.realpath(process.environ().get("TMPDIR", "/"))
            if pid != os.getpid() and not above.isdisjoint([temporary, *map(str, Path(temporary).parents)]):
                process.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
