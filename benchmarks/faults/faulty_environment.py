"""An environment that goes wrong as it is told. Workers import this module, so it imports little."""

from __future__ import annotations

import os
import signal
import time

from g2po_trl import Observation, StepResult, TextEnvironment


class Suffering(TextEnvironment):
    """Does what the action says, and the task for its reset. Ends with "end", which pays."""

    def reset(self, task_id="", fault=""):
        self.suffer(fault)
        return Observation("go", admissible_actions=["go"])

    def step(self, action):
        self.suffer(action)
        return StepResult("go", reward=10.0 * (action == "end"), terminated=action == "end")

    def suffer(self, fault):
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise RuntimeError("the door is stuck")
