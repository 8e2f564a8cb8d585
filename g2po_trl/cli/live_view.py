"""The viewer during a training run: `g2po train … --view`."""

from __future__ import annotations

import time
from pathlib import Path

from transformers import TrainerCallback

from ..runs.callbacks import print_line
from ..view.server import POLL_SECONDS, Server
from ..view.sources import Sources, open_folder


class LiveView(TrainerCallback):
    """Serves the viewer on loopback while a run trains, and prints its address.

    Args:
        folder: the run's `output_dir`.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.server: Server | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.server is not None or not state.is_world_process_zero:
            return
        self.server = Server(Sources(open_folder(self.folder, live=True)))
        self.server.start()
        print_line(f"Watch the run at {self.server.address} (on this machine)")

    def close(self) -> None:
        """End the server, after an open page has read the run's last files."""
        if self.server is None:
            return
        end = time.monotonic()
        while self.server.asked > end - 2 * POLL_SECONDS and time.monotonic() < end + 2 * POLL_SECONDS:
            time.sleep(0.2)
            if self.server.asked > end and time.monotonic() > self.server.asked + 1.0:
                break
        self.server.shutdown()
        print_line(f"The page is no longer served. To open the run again: g2po view {self.folder}")
        self.server = None
