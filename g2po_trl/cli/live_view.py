"""The viewer during a training run: `g2po train … --view`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from transformers import TrainerCallback

from ..runs.callbacks import print_line
from ..view.server import POLL_SECONDS


class LiveView(TrainerCallback):
    """Serves the viewer on loopback, in a process of its own, while a run trains; it prints its address.

    Args:
        folder: the run's `output_dir`.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._process: subprocess.Popen | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self._process is None and state.is_world_process_zero:
            command = [sys.executable, "-m", "g2po_trl.view.server", str(self.folder)]
            # Its stdin ends with this process, also if that is killed. An interrupt is for the training.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """End the server, after an open page has read the run's last files."""
        if self._process is not None:
            time.sleep(POLL_SECONDS + 1)
            self._process.communicate()
            print_line(f"The page is no longer served. To open the run again: g2po view {self.folder}")
            self._process = None
