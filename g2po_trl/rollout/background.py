"""A rollout in a thread of its own, so that the caller's thread can compute with what has ended already."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from .episodes import Episode


class Interrupted(BaseException):
    """Raised in the rollout's thread when nobody waits for it any more; like Ctrl-C, no failure of what it hits."""


class Background:
    """Plays in a thread, from `with` on.

        with Background(lambda on_end: player.play(tasks, on_end=on_end)) as rollout:
            while not rollout.is_over:
                for episode in rollout.ended():
                    ...
        trajectories, stats = rollout.result

    Player, environments and engine belong to the thread meanwhile. When the block is left before the rollout is over,
    by Ctrl-C or any other exception, the thread is interrupted, as Ctrl-C would do it, and waited for: environments
    and engine can be used again, or closed. That takes as long as one call of the engine or a second, whichever is
    longer.

    Args:
        play: plays, and calls the function it is given with each episode that has ended.
        device: of an engine that computes in the thread; each thread has a current CUDA device of its own.
    """

    def __init__(self, play: Callable[[Callable[[Episode], None]], Any], device: torch.device | None = None):
        self.play, self.device = play, device
        self.result, self.is_over = None, False
        self._said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="g2po-rollout", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._thread.is_alive() and kind is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )
        self._thread.join()

    def ended(self, wait: bool = True) -> list[Episode]:
        """Episodes that have ended since the last time. At the end of the rollout there is a `result`.

        Args:
            wait: until there is one, or the rollout is over.

        Raises:
            BaseException: what the thread raised, with its traceback.
        """
        episodes: list[Episode] = []
        while not self.is_over and (not self._said.empty() or (wait and not episodes)):
            what, value = self._said.get()
            if what == "failed":
                raise value
            if what == "result":
                self.result, self.is_over = value, True
            else:
                episodes.append(value)
        return episodes

    def _run(self) -> None:
        try:
            if self.device is not None and self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            result = self.play(lambda episode: self._said.put(("ended", episode)))
            self._said.put(("result", result))
        except BaseException as error:
            self._said.put(("failed", error))
