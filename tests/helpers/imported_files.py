"""Files that a test imports by their path, as a command does, are forgotten: each test writes its own `agent.py`."""

import os
import sys
from pathlib import Path

HELPERS = Path(__file__).parent


def forget():
    loading = sys.modules.get("g2po_trl.environments.loading")
    folders = {folder for folder in loading.FOLDERS if folder != HELPERS} if loading else set()
    sys.path[:] = [entry for entry in sys.path if Path(entry) not in folders and "pytest-of-" not in str(entry)]
    if folders:
        inside = tuple(f"{folder}{os.sep}" for folder in folders)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(inside):
                del sys.modules[name]
        loading.FOLDERS.clear()
