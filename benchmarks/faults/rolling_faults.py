"""Partial rollouts whose environments hang, die and raise: is every episode accounted for?

    python -m benchmarks.faults.rolling_faults [--output FOLDER] [--iterations 50] [--share 0.3]

No model: a scripted actor answers at once or after a while. A share of the episodes, drawn in advance, hangs (until
the time limit kills their worker), kills its own process or raises in one of its steps; of the tasks, one in ten does
so in `reset`. Streaming and in turns, one and two rollouts ahead; every tenth iteration a panel is played in the same
pool. Counts how each episode ended by what was planned for it, those that are trained on once, those that are open at
the end, and the others: doubled or lost. Prints all; writes it to OUTPUT/results.json.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common import facts, write_results
from benchmarks.faults.faulty_environment import FaultyEnvironment
from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.engines.sampling import derived_seed
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.experimental.partial_rollouts import PartialRollouts
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.player import Player
from g2po_trl.rollout.strategy import RolloutContext

FAULTS = {"hang": "timeout", "die": "crash", "raise": "exception"}  # and what the pool calls it


class Scripted:
    """Answers with what was planned for an episode: actor and session in one. Some answers take a few polls."""

    is_collective = False

    def __init__(self, seed: int, share: float, streams: bool, max_turns: int):
        self.seed, self.share, self.streams, self.max_turns = seed, share, streams, max_turns
        self.asked: dict[int, Episode] = {}
        self.random = random.Random(seed)

    def plan(self, number: int) -> tuple[int, str, int]:
        """(turns, fault, its turn); some are longer than `max_turns`."""
        drawn = random.Random(derived_seed(self.seed, number))
        turns = drawn.randint(1, self.max_turns + 1)
        fault = drawn.choice(list(FAULTS)) if drawn.random() < self.share else ""
        return turns, fault, drawn.randint(1, min(turns, self.max_turns))

    def rollout(self):
        return nullcontext()

    def session(self, sampling, seeds, stats):
        self.asked.clear()
        self.seeds = seeds
        return self

    def close(self):
        pass

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def ask(self, episodes):
        known = self.seeds if isinstance(self.seeds, dict) else range(len(self.seeds))
        assert all(episode.number in known and episode.number not in self.asked for episode in episodes)
        self.asked |= {episode.number: episode for episode in episodes}

    def receive_steps(self, timeout):
        ready = [number for number in self.asked if not self.streams or self.random.random() < 0.5]
        return [(episode, self._step(episode)) for episode in map(self.asked.pop, ready)]

    def _step(self, episode: Episode):
        turns, fault, when = self.plan(episode.number)
        turn = len(episode.steps) + 1
        return episode.step(fault if fault and turn == when else "end" if turn == turns else "go", None)


class Watched(PartialRollouts):
    """Knows all episodes that it has ever opened, in their order: an episode's number is its place."""

    def __init__(self, context: RolloutContext, **options: Any):
        self.opened: list[tuple[Episode, dict[str, Any]]] = []
        super().__init__(context, **options)

    def _begin_group(self, task, version):
        super()._begin_group(task, version)
        self.opened += [(episode, task) for episode in self.groups[-1].members]


def expected(actor: Scripted, episode: Episode, task: dict[str, Any]) -> tuple[str, str]:
    """(what was planned, the outcome or kind of failure that it must have)."""
    if task["fault"]:
        return f"{task['fault']} in reset", FAULTS[task["fault"]]
    turns, fault, _ = actor.plan(episode.number)
    if fault:
        return f"{fault} in a step", FAULTS[fault]
    return ("success", "success") if turns <= actor.max_turns else ("truncated", "truncated")


def play(
    streams: bool,
    ahead: int,
    iterations: int,
    share: float,
    seed: int = 0,
    limit: float = 0.5,
    size: int = 4,
    group_size: int = 4,
    workers: int = 4,
    max_turns: int = 6,
) -> dict[str, Any]:
    """Counts of one run."""
    tasks = [{"task_id": str(number), "fault": ""} for number in range(30)]
    for number, fault in zip((3, 13, 23), FAULTS):
        tasks[number]["fault"] = fault
    actor, order, seconds, ages = Scripted(seed, share, streams, max_turns), random.Random(seed), [], Counter()
    trained: Counter[int] = Counter()
    panels: Counter[str] = Counter()
    with EnvironmentPool(
        FaultyEnvironment,
        PoolLimits(workers, 4 * limit, limit, environment_load_timeout=60.0),
    ) as pool:
        player = Player(pool, actor, EpisodeLimits(max_turns), streams=streams)
        rolling = Watched(RolloutContext(player, group_size, tasks, seed), max_off_policy_steps=ahead)
        for version in range(1, iterations + 1):
            rows = [task for task in order.choices(tasks, k=size) for _ in range(group_size)]
            clock = time.perf_counter()
            trajectories = rolling.collect(rows, range(len(rows)), version).trajectories
            seconds.append(time.perf_counter() - clock)
            assert len(trajectories) == size * group_size
            trained.update(id(trajectory.steps) for trajectory in trajectories)
            ages.update(version - step.policy_version for played in trajectories for step in played.steps)
            if version % 10 == 0:
                played, _ = player.play([task for task in tasks if not task["fault"]][:8])
                panels.update(trajectory.outcome for trajectory in played)
        opened = list(rolling.opened)
        still_open = {id(episode.steps) for group in rolling.groups for episode in group.members}
        replayed = pool.replayed
    endings: dict[str, Counter[str]] = {}
    surprises = 0
    for episode, task in opened:
        if id(episode.steps) in trained:
            planned, wanted = expected(actor, episode, task)
            trajectory = episode.trajectory()
            found = (trajectory.error or "").split(":")[0] if trajectory.error else trajectory.outcome
            endings.setdefault(planned, Counter())[found] += 1
            surprises += found != wanted
    both = sum(id(episode.steps) in trained and id(episode.steps) in still_open for episode, _ in opened)
    neither = sum(id(episode.steps) not in trained and id(episode.steps) not in still_open for episode, _ in opened)
    return {
        "episodes opened": len(opened),
        "trained on": sum(trained.values()),
        "open at the end": len(still_open),
        "trained on twice": sum(count > 1 for count in trained.values()),
        "unknown": len(trained.keys() - {id(episode.steps) for episode, _ in opened}),
        "trained on and open": both,
        "lost": neither,
        "share with a fault": round(
            sum(sum(c.values()) for p, c in endings.items() if " in " in p) / max(1, sum(trained.values())), 3
        ),
        "endings by plan": {planned: dict(counts) for planned, counts in sorted(endings.items())},
        "endings other than planned": surprises,
        "replayed after a neighbour's fault": replayed,
        "steps by age": {str(age): count for age, count in sorted(ages.items())},
        "panel's episodes, by outcome": dict(panels),
        "seconds": round(sum(seconds), 1),
        "longest iteration": round(max(seconds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--limit", type=float, default=0.5, help="seconds before a hanging episode is given up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(1800, exit=True)  # a deadlock says where
    results: dict[str, Any] = {
        **facts(),
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
    }
    for streams in (True, False):
        for ahead in (1, 2):
            name = f"{'streaming' if streams else 'in turns'}, max_off_policy_steps={ahead}"
            results[name] = play(streams, ahead, args.iterations, args.share, args.seed, args.limit)
            print(name, json.dumps(results[name]), flush=True)
    if args.output:
        write_results(args.output, results)


if __name__ == "__main__":
    main()
