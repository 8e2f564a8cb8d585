"""Thousands of episodes of an environment that fails in every way: each ends as it must, no zombie, no leaked file.

`make test-slow` plays 3,000 of them, `make test` 140.
"""

import os
import random
import signal
import sys
import time
from collections import Counter

import psutil
import pytest

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment
from g2po_trl.environments.pool.pool import EnvironmentFailure

FAULTS = ("raise", "exit", "kill", "hang", "huge", "unicode", "empty", "none", "nan", "leak", "fine")
RARE = (4, 1, 1, 1, 1, 4, 4, 2, 2, 2, 78)
OFTEN = (10, 10, 0, 10, 0, 0, 0, 0, 0, 0, 70)
TEXTS = {"huge": "x" * 10_000_000, "unicode": "\u202e🙂é\x00\n", "empty": "", "none": None}


class Pathological(TextEnvironment):
    """What goes wrong, and when, is the task's."""

    def reset(self, name, fault, at, length):
        self.name, self.fault, self.at, self.left, self.done = name, fault, at, length, 0
        return self.observe()

    def observe(self):
        text = f"{self.name} {self.done}"
        if self.done != self.at:
            return Observation(text)
        if self.fault == "raise":
            raise ValueError("as asked")
        if self.fault == "exit":
            sys.exit(3)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(60)
        if self.fault == "leak":
            self.file = open(os.devnull)  # noqa: SIM115  (a leak)
        return Observation(TEXTS.get(self.fault, text))

    def step(self, action):
        self.done += 1
        reward = float("nan") if self.fault == "nan" and self.done == self.at else 1.0
        return StepResult(self.observe(), reward, terminated=self.done == self.left)


EXPECTED = {"raise": "exception", "exit": "crash", "kill": "crash", "hang": "timeout"}
EXPECTED |= dict.fromkeys(("huge", "none", "nan"), "invalid")


def play(number, weights, seed=0):
    """Plays that many episodes, in slots that are filled again at once; gives how each ended, by its fault."""
    rng = random.Random(seed)
    tasks = []
    for name in range(number):
        fault, length = rng.choices(FAULTS, weights)[0], rng.randint(1, 5)
        tasks.append({"name": name, "fault": fault, "at": rng.randint(fault == "nan", length), "length": length})
    outcomes, playing, waiting = Counter(), {}, list(range(number))
    with EnvironmentPool(Pathological, PoolLimits(2, 1.0, 1.0, environment_worker_resets=40)) as pool:
        while waiting or playing:
            new = [waiting.pop(0) for _ in range(min(12 - len(playing), len(waiting)))]
            for slot, name in zip(pool.begin([tasks[name] for name in new], [name // 4 for name in new]), new):
                assert slot not in playing
                playing[slot] = name, 0
            for slot, answer in pool.receive(timeout=None).items():
                name, turn = playing.pop(slot)
                fault = tasks[name]["fault"]
                if isinstance(answer, EnvironmentFailure):
                    outcomes[fault, answer.kind] += 1
                    continue
                assert getattr(answer, "observation", answer).text in (f"{name} {turn}", TEXTS.get(fault))
                if getattr(answer, "terminated", False):
                    outcomes[fault, "ended"] += 1
                else:
                    playing[slot] = name, turn + 1
                    pool.send({slot: "go"})
        assert pool.receive(timeout=None) == {} and pool.replayed > 0 and (pool.recycled > 0 or number < 2000)
    return outcomes


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((2000, RARE, 0.02), (1000, OFTEN, 0.1))]


@pytest.mark.parametrize(("number", "weights", "most"), [(100, RARE, 0.02), (40, OFTEN, 0.1), *SLOW])
def test_no_episode_is_lost_and_nothing_is_left(number, weights, most):
    play(40, OFTEN, seed=9)  # what is made once is made
    this = psutil.Process()
    files, children = this.num_fds(), len(this.children(recursive=True))
    outcomes = play(number, weights)
    assert sum(outcomes.values()) == number
    # Each ends as its own fault says, whatever its neighbours do; but for what is given up after three time limits in
    # a row, and a busy machine makes a second pass now and then.
    others = {key: count for key, count in outcomes.items() if key[1] != EXPECTED.get(key[0], "ended")}
    assert sum(others.values()) <= most * number, outcomes
    deadline = time.monotonic() + 10
    while len(this.children(recursive=True)) > children and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(this.children(recursive=True)) == children, "also no zombie"
    assert this.num_fds() <= files + 2
