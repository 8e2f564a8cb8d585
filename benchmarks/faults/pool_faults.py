"""What the pool makes of slow steps and of episodes that go wrong.

    python -m benchmarks.faults.pool_faults [--output benchmarks/results/pool_faults]

One group of 8 whose steps take 0.2 s (they sleep), in 8 workers: seconds a turn. Then 8
episodes in one worker, of which one hangs or dies: how many fail, are lost, and are played to their end with the
observations of an undisturbed run, and what it costs. Prints all; writes it to OUTPUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks.common import facts, write_results
from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment

TURNS = 8


class Counting(TextEnvironment):
    """Takes `seconds` for a step and fails with the fault of its task in the turn it names (0: in reset)."""

    def reset(self, seconds=0.0, fault="", turn=0):
        self.seconds, self.fault, self.turn, self.done = seconds, fault, turn, 0
        self.fail()
        return Observation("0", admissible_actions=["go"])

    def step(self, action):
        self.done += 1
        self.fail()
        time.sleep(self.seconds)
        return StepResult(f"{self.done} {action}", terminated=self.done == TURNS, reward=10.0 * (self.done == TURNS))

    def fail(self):
        if self.done == self.turn and self.fault == "hang":
            time.sleep(3600)
        if self.done == self.turn and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.done == self.turn and self.fault == "exit":
            os._exit(1)


def seconds_a_turn() -> float:
    with EnvironmentPool(Counting, PoolLimits(8)) as pool:
        pool.reset([{"seconds": 0.2}] * 8, groups=[0] * 8)
        seconds = []
        for _ in range(TURNS):
            clock = time.perf_counter()
            pool.step(dict.fromkeys(range(8), "go"))
            seconds.append(time.perf_counter() - clock)
    return round(median(seconds), 3)


def play(pool: EnvironmentPool, tasks: list[dict]) -> tuple[list[list], float]:
    clock = time.perf_counter()
    seen = [[answer] for answer in pool.reset(tasks, groups=[0] * len(tasks))]
    for turn in range(TURNS):
        live = [slot for slot in range(len(tasks)) if not hasattr(seen[slot][-1], "kind")]
        for slot, answer in pool.step(dict.fromkeys(live, f"go {turn}")).items():
            seen[slot].append(answer)
    return seen, time.perf_counter() - clock


def with_a_fault(fault: str, turn: int, limit: float, faulty: int = 1) -> dict:
    """Return what becomes of 8 episodes of which the first `faulty` fail so."""
    with EnvironmentPool(Counting, PoolLimits(1, limit, limit)) as pool:
        undisturbed, before = play(pool, [{}] * 8)
        seen, seconds = play(pool, [{"fault": fault, "turn": turn}] * faulty + [{}] * (8 - faulty))
        return {
            "endings": dict(Counter(getattr(answers[-1], "kind", "ended") for answers in seen)),
            "as undisturbed": sum(a == b for a, b in zip(seen, undisturbed)),
            "seconds": round(seconds, 2),
            "seconds undisturbed": round(before, 2),
            "time limit": limit,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds before a hanging episode is given up")
    args = parser.parse_args()
    results = {
        **facts(),
        "seconds a turn, one group of 8, 8 workers, steps of 0.2 s": seconds_a_turn(),
        "8 episodes in one worker, one of them": {
            "hangs in a step": with_a_fault("hang", 5, args.limit),
            "kills its process": with_a_fault("kill", 5, args.limit),
            "exits": with_a_fault("exit", 5, args.limit),
            "hangs in reset": with_a_fault("hang", 0, args.limit),
        },
        "all 8 of a group hang in reset": with_a_fault("hang", 0, args.limit, faulty=8),
    }
    print(json.dumps(results, indent=2))
    if args.output:
        write_results(args.output, results)


if __name__ == "__main__":
    main()
