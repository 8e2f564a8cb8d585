"""An environment that hangs, crashes or raises on request. Workers import this module, so it imports little."""

from __future__ import annotations

import os
import signal
import time

from g2po_trl import Observation, StepResult, TextEnvironment


class FaultyEnvironment(TextEnvironment):
    """Fails as its action names it, or as its task does in reset. The action "end" ends the episode with a reward."""

    def reset(self, task_id="", fault=""):
        self.fail(fault)
        return Observation("go", admissible_actions=["go"])

    def step(self, action):
        self.fail(action)
        return StepResult("go", reward=10.0 * (action == "end"), terminated=action == "end")

    def fail(self, fault):
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise RuntimeError("the door is stuck")
