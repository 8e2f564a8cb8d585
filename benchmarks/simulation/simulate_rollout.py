"""How many episodes a second, and how busy the engine: rollouts played by the real loops on a virtual clock.

    python -m benchmarks.simulation.simulate_rollout --output FOLDER [--gpus 1 8 64] [--episodes 128 ...]
    python -m benchmarks.simulation.simulate_rollout --output FOLDER --record RUN [RUN ...]

`Loop` and `PartialRollouts` play them as they are, with what they wait for simulated (`simulated.py`).

1. Check: the rollouts of `streaming.py`, with each prompt's and completion's tokens and each added delay as they were.
   Two costs of the engine are what two of the measured rates give: of turns, and of the engine alone with all prompts
   at once. The other rates are predicted, and printed beside what was measured.
2. Predictions for Qwen2.5-1.5B on H100s, a rank each. Unit costs are those of `costs.py`: what a GPU does is assumed,
   what the host does is measured on a CPU. Episodes have recorded turns (groups of a run, up to 15) or drawn ones (up
   to 50). No GPU has confirmed these numbers.

A second call with the same output adds its rows to those that are there. `--record` takes turns and
outcomes of the trajectories of runs, by group, instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.common import command, machine
from benchmarks.simulation.simulated import EngineCosts, PoolCosts, Recorded
from benchmarks.simulation.simulated_rank import LOOPS, Group, Rank, all_at_once
from benchmarks.simulation.simulation_check import CHECKED, check
from g2po_trl.utils.json import write_json

VARIED: dict[str, dict[str, Any]] = {  # of the drawn world, one at a time
    "completions all as long": {"spread": 0.0},
    "completions less unequal": {"spread": 0.3},
    "steps of 0 to 2 s": {"wait": 2.0},
}


@dataclass(frozen=True)
class World:
    """Draws groups of episodes. `turns`: (turns, whether the environment ended it) of each member of known groups."""

    name: str
    turns: Sequence[Sequence[tuple[int, bool]]]
    max_turns: int
    prompt: int = 700
    completion: float = 150
    longest_completion: int = 512
    spread: float = 0.6
    wait: float = 0.0  # each step waits 0 to so many seconds

    def groups(self, number: int, seed: int) -> list[Group]:
        """Lengths of completions are log-normal, cut off at the longest; `spread`: of their logarithms."""
        rng = np.random.default_rng(seed)
        chosen = [self.turns[i] for i in rng.integers(len(self.turns), size=number)]

        def member(turns: int, ends: bool) -> Recorded:
            completions = np.exp(self.spread * rng.standard_normal(turns) - self.spread**2 / 2) * self.completion
            completions = np.clip(completions, 1, self.longest_completion).astype(int).tolist()
            waits = (self.wait * rng.random(turns)).tolist() if self.wait else [0.0] * turns
            return Recorded([self.prompt] * turns, completions, waits, ends)

        return [[member(*each) for each in group] for group in chosen]


def long_turns(groups: int = 200, seed: int = 0) -> list[list[tuple[int, bool]]]:
    """Up to 50 turns: 80 % of episodes win, after 8 to 30."""
    draw = random.Random(seed)

    def member() -> tuple[int, bool]:
        return (draw.randint(8, 30), True) if draw.random() < 0.8 else (50, False)

    return [[member() for _ in range(8)] for _ in range(groups)]


def dealt(groups: Sequence[Group], ranks: int) -> list[list[Group]]:
    """Each rank's part, in order, as a sampler deals episodes: a group may be divided."""
    flat = [(number, member) for number, group in enumerate(groups) for member in group]
    parts = []
    for rank in range(ranks):
        own: dict[int, list[Recorded]] = {}
        for number, member in flat[len(flat) * rank // ranks : len(flat) * (rank + 1) // ranks]:
            own.setdefault(number, []).append(member)
        parts.append(list(own.values()))
    return parts


def limit(world: World, gpus: int, episodes: int, engine: EngineCosts) -> float:
    """Seconds of the slowest rank's engine, if it is handed all prompts of a rollout at once."""
    return max(all_at_once(part, engine) for part in dealt(world.groups(episodes // 8, 1), gpus))


def predict(
    world: World,
    gpus: int,
    episodes: int,
    engine: EngineCosts,
    pool: PoolCosts,
    loop: str,
    update: float = 0.0,
    batches: int = 1,
) -> dict[str, Any]:
    """Rollouts of all ranks, each followed by an update, for which they wait for one another.

    The first ones do not count: they teach the pool how long steps take; and rolling groups begin all at once.
    """
    ranks = [Rank(engine, pool, world.max_turns, loop) for _ in range(gpus)]
    ahead, started = ranks[0].ahead, time.perf_counter()
    before = 2 + ahead if ahead else 1
    others = [part if ahead else [] for part in dealt(world.groups(ahead * episodes // 8, 99), gpus)]
    found, computing = [], []
    for batch in range(before + batches):
        first = not batch and not ahead
        number = max(gpus, min(episodes, 16 * gpus)) if first else episodes
        parts = dealt(world.groups(number // 8 or 1, batch), gpus)
        played = [rank.play(part, more) for rank, part, more in zip(ranks, parts, others)]
        together = max(rank.clock.now for rank in ranks) + update
        for rank in ranks:
            rank.clock.now = together
        if batch >= before:
            found.append(max(rank["seconds"] for rank in played))
            computing.append(sum(rank["computing"] for rank in played) / gpus)
    seconds = sum(found) / batches
    return {
        "world": world.name,
        "gpus": gpus,
        "episodes": episodes,
        "loop": loop,
        "seconds": round(seconds, 2),
        "update": round(update, 2),
        "episodes a second": round(episodes / seconds, 3),
        "engine computing": round(sum(computing) / batches / seconds, 3),
        "seconds of batches": [round(batch, 2) for batch in found],
        "simulated in, seconds": round(time.perf_counter() - started, 2),
    }


def record(folders: Sequence[Path]) -> dict[str, Any]:
    """[turns, whether the environment ended it] of each episode of runs' training rollouts, by group."""
    groups: list[list[tuple[int, bool]]] = []
    for folder in folders:
        for path in sorted(folder.glob("trajectories/train-*.jsonl")):
            of: dict[int, list[tuple[int, bool]]] = {}
            for line in path.read_text().splitlines():
                played = json.loads(line)
                if "steps" in played:
                    of.setdefault(played["group"], []).append((len(played["steps"]), played["outcome"] == "success"))
            groups += of.values()
    return {"max_turns": max(turns for group in groups for turns, _ in group), "groups": groups}


def report(results: dict[str, Any]) -> None:
    print("steps a second of streaming.py's rollouts; fitted: turns without added seconds, and all prompts at once")
    for name, found in results["check"].items():
        print(f"\n{name:38}{'predicted':>10}{'measured':>10}{'error':>8}")
        for added, what, predicted, measured, error in found[CHECKED]:
            print(f"up to {added:4} s more a step, {what:16}{predicted:8.2f}{measured:10.2f}{error:+8.1%}")
    print("\npredicted rollouts, Qwen2.5-1.5B on H100s")
    print(
        f"{'world':34}{'GPUs':>5}{'episodes':>9} {'loop':10}{'seconds':>9}{'ep./s':>8}{'computing':>10}{'of limit':>9}"
    )
    for row in results["predictions"]:
        print(
            f"{row['world']:34}{row['gpus']:5}{row['episodes']:9} {row['loop']:10}{row['seconds']:9.1f}"
            f"{row['episodes a second']:8.2f}{row['engine computing']:10.0%}{row['of its limit']:9.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--episodes", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--wait", type=float, default=0.5, help="slow environments: a step waits 0 to so many seconds")
    parser.add_argument("--workers", type=int, default=64, help="of a rank with slow environments")
    parser.add_argument("--loops", nargs="+", default=[*LOOPS], help='"turns", "streams", "rolling 1", "rolling 2"')
    parser.add_argument("--world", default="", help="only those with this in their name")
    parser.add_argument("--batches", type=int, default=1, help="rollouts that count")
    parser.add_argument("--record", type=Path, nargs="+", help="runs whose episodes' turns to take")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    recorded = options.output / "turns.json"
    if options.record:
        write_json(recorded, record(options.record) | {"runs": [folder.name for folder in options.record]})
        return
    path = options.output / "results.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    unit_costs = json.loads((options.output.parent / "cost_model" / "results.json").read_text())["unit costs"]
    known = json.loads((options.output / "streaming" / "results.json").read_text())
    results: dict[str, Any] = {
        "commands": [*before.get("commands", []), command()],
        "machine": machine(),
        "check": {
            name: check(json.loads((folder / "results.json").read_text()), known, unit_costs)
            for name, folder in (
                ("as published", options.output.parent / "streaming"),
                ("beside other jobs", options.output / "beside_other_jobs"),
                ("beside more jobs", options.output / "streaming"),
            )
        },
    }
    played = json.loads(recorded.read_text())
    engine, fast, update = on_h100(unit_costs)
    slow = replace(fast, workers=options.workers, cores=fast.workers)
    results |= {"engine": asdict(engine), "environments": {"fast": asdict(fast), "slow": asdict(slow)}}
    short = World("recorded, up to 15 turns", played["groups"], played["max_turns"])
    long = World("80 % win in 8 to 30 of 50 turns", long_turns(), 50)
    grid = [(gpus, episodes) for gpus in options.gpus for episodes in options.episodes]
    cells = [(world, fast, *size) for world in (short, long) for size in grid]
    waiting = replace(long, name=f"{long.name}, slow", wait=options.wait)
    cells += [(waiting, slow, *size) for size in grid if size[1] // size[0] <= 1024]
    for name, change in VARIED.items():
        cells.append((replace(long, name=f"50 turns, {name}", **change), slow if "wait" in change else fast, 8, 512))
    rows = {_cell(row): row for row in before.get("predictions", [])}
    for world, pool, gpus, episodes in cells:
        if options.world not in world.name:
            continue
        at_once = limit(world, gpus, episodes, engine)
        for loop in options.loops:
            if loop not in LOOPS and episodes // 8 < gpus:
                continue  # rolling groups are not divided
            seconds = update(world, gpus, episodes)
            found = predict(world, gpus, episodes, engine, pool, loop, seconds, options.batches)
            found |= {"limit, seconds": round(at_once, 2), "of its limit": round(at_once / found["seconds"], 3)}
            rows[_cell(found)] = found
            print(json.dumps(found), file=sys.stderr, flush=True)
        results["predictions"] = list(rows.values())
        write_json(path, results, indent=1)
    report(results)


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("world", "gpus", "episodes", "loop"))


def on_h100(unit_costs: dict[str, float]) -> tuple[EngineCosts, PoolCosts, Callable[[World, int, int], float]]:
    """Costs of Qwen2.5-1.5B on H100s as `costs.py` assumes them; and seconds of an iteration without its rollout."""
    from benchmarks.simulation.costs import Gpu, UnitCosts, Work, advantages, batch, exchange, gpu_costs, logps, update

    gpu, host = Gpu(), UnitCosts(**unit_costs)
    work = Work(8, prompt_tokens=World.prompt, reply_tokens=World.completion)
    c = gpu_costs("1.5b", gpu, work, host)
    a_token = c.kv_bytes / (gpu.bandwidth * gpu.read_share)
    engine = EngineCosts(
        step=c.decode_pass,
        sequence=c.generated_token - (work.prompt_tokens + work.reply_tokens / 2) * a_token,
        context=a_token,
        prompt_token=c.prompt_token,
        kv_tokens=c.kv_memory / c.kv_bytes,
        prompt=c.built_prompt,
        prompt_text=c.built_token,
    )

    def after(world: World, gpus: int, episodes: int) -> float:
        mean = np.mean([turns for group in world.turns for turns, _ in group]) / world.max_turns
        w = replace(work, episodes=episodes, ranks=gpus, turns=world.max_turns, active=float(mean))
        costs = gpu_costs("1.5b", gpu, w, host)
        return sum(phase(w, costs) for phase in (advantages, batch, logps, update, exchange))

    return engine, PoolCosts(gpu.cores, step=3.6e-3, reset=0.033, first_reset=0.033), after


if __name__ == "__main__":
    main()
