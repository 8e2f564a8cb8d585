"""An environment that does what the action says, and pools of faulty ones, for tests of the pool."""

import contextlib
import os
import signal
import time

from toy_environments import FaultyEnvironment

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment


class Reporter(TextEnvironment):
    """Tells its process and its object; does what the action says."""

    def reset(self, seed=0, fault=None):
        self.seed, self.steps = seed, 0
        if fault == "raise":
            raise RuntimeError("no such house")
        if fault == "hang":
            time.sleep(60)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is not None:
            return fault
        return Observation(f"seed {seed}", state_key=f"{os.getpid()} {id(self)}")

    def step(self, action):
        self.steps += 1
        if action == "raise":
            raise RuntimeError("the door is stuck")
        if action == "hang":
            time.sleep(60)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "nan":
            return StepResult("x", reward=float("nan"))
        if action == "none":
            return None
        if action == "long":
            return StepResult("x" * 2000)
        return StepResult(f"{self.seed} {action} {self.steps}", reward=self.steps, terminated=action == "end")


def pids(observations):
    return [o.state_key.split()[0] for o in observations]


def faulty_pool(workers=1, reset_timeout=30, step_timeout=30, **limits):
    return EnvironmentPool(FaultyEnvironment, PoolLimits(workers, reset_timeout, step_timeout, **limits))


@contextlib.contextmanager
def interrupted(seconds):
    """Ctrl-C after some seconds."""
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
