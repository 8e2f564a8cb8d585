"""Pools of environments that do what the action says."""

import os
import signal
import threading

from toy_environments import FaultyEnvironment

from g2po_trl import EnvironmentPool, Observation, PoolLimits


class Reporter(FaultyEnvironment):
    """Tells its process and its object, and counts its steps."""

    def reset(self, seed=0, fault=""):
        self.steps, seen = 0, super().reset(seed, fault)
        return seen if fault else Observation(f"seed {seed}", f"{os.getpid()} {id(self)}")

    def step(self, action):
        self.steps += 1
        return super().step(action if action.startswith("result ") else f"{action} {self.steps}")


def pids(observations):
    return [o.state_key.split()[0] for o in observations]


def faulty_pool(workers=1, reset_timeout=30, step_timeout=30, **limits):
    return EnvironmentPool(FaultyEnvironment, PoolLimits(workers, reset_timeout, step_timeout, **limits))


def interrupt_after(seconds):
    """Ctrl-C."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
