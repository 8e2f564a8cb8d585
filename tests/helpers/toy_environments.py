"""Small environments: a game with one reward at its end, and others that count, wait and fail in every way there is.

Workers import this module: it imports nothing that takes long.
"""

import os
import signal
import sys
import time
from pathlib import Path

from g2po_trl import Observation, StepResult, TextEnvironment

DOORS = {"hall": ["kitchen", "cellar"], "kitchen": ["hall", "garden"], "cellar": ["hall"], "garden": ["kitchen"]}


class KeyDoorEnvironment(TextEnvironment):
    """Find the key, carry it to the hall, open the door. Pays 10 at the end, in 3 to 7 steps by where the key lies."""

    def reset(self, key_room="garden"):
        self.room, self.key_room, self.has_key = "hall", key_room, False
        return self._observe("You wake up.")

    def step(self, action):
        opened = action == "open door" and self.room == "hall" and self.has_key
        text = "Nothing happens."
        if action.startswith("go ") and action[3:] in DOORS[self.room]:
            self.room, text = action[3:], f"You go to the {action[3:]}."
        elif action == "take key" and self.room == self.key_room and not self.has_key:
            self.has_key, text = True, "You take the key."
        elif opened:
            text = "The door opens."
        return StepResult(self._observe(text), reward=10.0 * opened, terminated=opened)

    def _observe(self, text):
        actions = [f"go {room}" for room in DOORS[self.room]] + ["take key", "open door"]
        seen, key = f"{text} You are in the {self.room}.", f"{self.room} {self.has_key}"
        return Observation(seen, key, actions, task="Open the door.")


KEY_DOOR_WALKTHROUGHS = {
    "hall": ["take key", "open door"],
    "cellar": ["go cellar", "take key", "go hall", "open door"],
    "garden": ["go kitchen", "go garden", "take key", "go kitchen", "go hall", "open door"],
}


class Unloadable:
    def __reduce__(self):
        return int, ("not a number",)


def numpy_values():
    import numpy as np

    info = {"success": np.True_, "score": np.float32(0.5), "counts": np.array([1, 2]), "loss": float("nan")}
    info |= {"path": "half \ud800", "object": Unloadable(), 1: {np.inf, -np.inf}}
    seen = Observation("x", admissible_actions=np.array(["a", "b"]))
    return StepResult(seen, np.float32(0.5), np.bool_(True), info=info)


def fork(_):
    """Die, and leave a process that holds the pipe open."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    kill()


def kill(number=""):
    os.kill(os.getpid(), int(number or signal.SIGKILL))


def fail(_):
    raise RuntimeError("no" * 100_000)


FAULTS = {"fork": fork, "kill": lambda _: kill(), "signal": kill, "raise": fail}
FAULTS |= {"sleep": lambda seconds: time.sleep(float(seconds)), "exit": lambda code: sys.exit(int(code))}


class FaultyEnvironment(TextEnvironment):
    def reset(self, number=0, fault=""):
        self.number = number
        if fault in FAULTS:
            FAULTS[fault]("")
        return fault or Observation(f"number {number}", state_key=str(os.getpid()))

    def step(self, action):
        command, _, argument = action.partition(" ")
        if command == "result":
            return RESULTS[argument]()
        FAULTS.get(command, str)(argument)
        return StepResult(f"{self.number} {action}", reward=1)


RESULTS = {"nan": lambda: StepResult("x", reward=float("nan")), "none": lambda: None, "numpy": numpy_values}


class Countdown(TextEnvironment):
    """Ends after `turns` steps; pays and judges as told."""

    def reset(self, turns, reward=10.0, success=None, truncates=False, failure_reason=None, task_id=None):
        self.left, self.reward, self.truncates = turns, reward, truncates
        facts = {"success": success, "failure_reason": failure_reason}
        self.info = {name: fact for name, fact in facts.items() if fact is not None}
        return self.look(task="TASK")

    def look(self, **fields):
        return Observation(f"left {self.left}", state_key=f"k{self.left}", admissible_actions=["go"], **fields)

    def step(self, action):
        self.left -= 1
        done = self.left == 0
        reward = self.reward if done else 0.0
        return StepResult(self.look(), reward, done and not self.truncates, done and self.truncates, self.info)


class Slow(Countdown):
    def __init__(self, seconds):
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class Overwhelming(TextEnvironment):
    """Lists `actions` actions, and a hundred more each time one of them is played, which pays 1; ends after three."""

    def reset(self, actions):
        self.actions = [f"go {number}" for number in range(actions)]
        self.played = 0
        return Observation("hall", admissible_actions=self.actions)

    def step(self, action):
        self.played += 1
        self.actions += [f"go {number}" for number in range(100)]
        return StepResult(Observation("hall", admissible_actions=self.actions), 1.0, terminated=self.played == 3)


class Waiting(TextEnvironment):
    """An even episode's step ends when an odd episode has been asked for an action."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def reset(self, number):
        self.number, self.steps = number, 0
        return Observation(f"{number}")

    def step(self, action):
        self.steps += 1
        for _ in range(1000):
            if self.number == 1 or (self.folder / f"asked-1-{self.steps}").exists():
                return StepResult(f"{self.number} {self.steps}", terminated=self.steps == 3)
            time.sleep(0.01)
        raise TimeoutError("nobody asked about the other half")


class Dying(Countdown):
    def step(self, action):
        if self.reward == 13.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
