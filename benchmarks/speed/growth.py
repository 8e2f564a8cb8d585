"""Cost of a step sample as an iteration grows: 1, 2, 4 and 8 times the trajectories; episodes of 10, 20 and 40 turns.

    python -m benchmarks.speed.growth --output benchmarks/results/growth [--repetitions 5] [--series episodes,turns]

All points of a series hold the same step samples, played once by the tiny model on generated ALFWorld games, 8
episodes each; only how many of them make up one iteration differs:

    episodes    all groups as one iteration of 128 episodes, as two of 64, four of 32, eight of 16
    turns       16 episodes that go on after a win, 40 turns each; for 20 and 10 turns their stretches of so many turns
                count as episodes, in two and four iterations

So a difference is the size's and not the games'. Timed, a point's iterations added up, points in turn within each
repetition: graph and advantages; step samples and micro-batches; log-probabilities under the reference; forward and
backward (no optimizer step: it does not depend on the samples). The rollout is played anew, one iteration a
repetition, so its samples do differ; `environments` is the workers' part of it. A second call with the same output
adds its repetitions to those that are there.

Other jobs may share the machine, so the table is of CPU time (one thread), beside its ratio to the first point's, and
that of wall time in brackets; medians of the repetitions. All values go to OUTPUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.common import facts, write_results
from benchmarks.speed.phases import make_trainer, update
from g2po_envs.alfworld import AlfworldEnvironment, Manifest
from g2po_trl import EnvironmentPool, EpisodeLimits, G2POTrainer, StateGraph, StepResult, Trajectory, g2po
from g2po_trl.update.batch import StepBatch

SIZES, TURNS, LIMIT = (1, 2, 4, 8), (10, 20, 40), 0.15
Groups = list[list[Trajectory]]
Point = tuple[list[Groups], Callable[[int], tuple[list[Trajectory], Any]]]  # iterations; the rollout of one of them


class Endless(AlfworldEnvironment):
    """Goes on after a win, which pays once: every episode has as many steps as turns."""

    def reset(self, **task: Any):
        self.won = False
        return super().reset(**task)

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        result = replace(result, reward=0.0 if self.won else result.reward, terminated=False)
        self.won |= result.info["success"]
        return result


def play(trainer: G2POTrainer, pool: EnvironmentPool, tasks: list[dict[str, Any]], max_turns: int):
    trainer.player.pool = pool
    trainer.player.limits = EpisodeLimits(max_turns)
    return trainer.play(tasks, groups=[i // 8 for i in range(len(tasks))])


def play_groups(trainer: G2POTrainer, pool: EnvironmentPool, tasks: list[dict[str, Any]], max_turns: int) -> Groups:
    trajectories, _ = play(trainer, pool, tasks, max_turns)
    return [trajectories[i : i + 8] for i in range(0, len(trajectories), 8)]


def episode_points(trainer: G2POTrainer, tasks: list[dict[str, Any]]) -> dict[str, Point]:
    pool, max_turns = trainer.player.pool, trainer.args.max_turns
    groups, points = play_groups(trainer, pool, tasks, max_turns), {}
    for size in SIZES:
        each = len(groups) * size // SIZES[-1]
        starts = range(0, len(groups), each)
        parts = [tasks[8 * start : 8 * (start + each)] for start in starts]
        points[str(8 * each)] = (
            [groups[start : start + each] for start in starts],
            partial(lambda parts, n: play(trainer, pool, parts[n % len(parts)], max_turns), parts),
        )
    return points


def turn_points(trainer: G2POTrainer, tasks: list[dict[str, Any]], manifest: Manifest) -> dict[str, Point]:
    hidden = ("help", "look", "inventory", "examine")
    pool = EnvironmentPool(partial(Endless, manifest, hidden, intro=False))
    groups, points = play_groups(trainer, pool, tasks, TURNS[-1]), {}
    for turns in TURNS:
        stretches = [slice(start, start + turns) for start in range(0, TURNS[-1], turns)]
        points[str(turns)] = (
            [[[replace(t, steps=t.steps[part]) for t in group] for group in groups] for part in stretches],
            partial(lambda turns, _: play(trainer, pool, tasks, turns), turns),
        )
    return points


def phases(trainer: G2POTrainer, groups: Groups) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What an iteration does after its rollout, and what there is to do."""
    advantages = g2po(StateGraph.from_groups(groups))
    flat = [trajectory for group in groups for trajectory in group]

    def cut() -> tuple[list[dict[str, Any]], dict[str, float]]:
        (micro_batches,), metrics = trainer.update.split(StepBatch.from_trajectories(flat, advantages))
        return micro_batches, metrics

    micro_batches, metrics = cut()
    trainer._add_log_probs([micro_batches])  # `update` reads them
    return {
        "advantages": lambda: g2po(StateGraph.from_groups(groups)),
        "batch": cut,
        "logps": lambda: trainer._add_log_probs([micro_batches]),
        "update": lambda: update(trainer, micro_batches),
    }, {name: int(metrics[f"update/{name}"]) for name in ("step_samples", "forwarded_tokens", "micro_batches")}


def clock(run: Callable[[], Any], at_least: float = 0.0) -> tuple[float, float]:
    """Wall and CPU seconds of a call, over as many as take `at_least` seconds."""
    wall, cpu, calls = time.perf_counter(), time.process_time(), 0
    while calls == 0 or time.perf_counter() - wall < at_least:
        run()
        calls += 1
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


def workers_cpu(trainer: G2POTrainer) -> float:
    """CPU seconds of the environment workers so far."""
    nanoseconds = (Path(f"/proc/{pid}/schedstat").read_text().split()[0] for pid in trainer.player.pool.worker_pids)
    return sum(map(int, nanoseconds)) / 1e9


def measure(trainer: G2POTrainer, points: dict[str, Point], entries: dict[str, Any], options) -> None:
    """Adds [wall seconds, CPU seconds, step samples] of each phase and repetition to the points' entries."""
    runs = {}
    for name, (iterations, _) in points.items():
        made = [phases(trainer, groups) for groups in iterations]
        runs[name] = [run for run, _ in made]
        facts = {"iterations": len(made)} | {key: sum(m[key] for _, m in made) for key in made[0][1]}
        if facts != {key: entries.get(name, facts)[key] for key in facts}:
            raise SystemExit("the output holds values of other trajectories: choose another --output")
        entries.setdefault(name, facts | {"values": {}})
    runs[next(iter(points))][0]["update"]()  # warms up
    for _ in range(options.repetitions):
        for name, (_, roll_out) in points.items():
            entry = entries[name]
            for phase in runs[name][0]:
                took = [clock(run[phase], 0.1) for run in runs[name]]
                total = [round(sum(part), 5) for part in zip(*took)]
                entry["values"].setdefault(phase, []).append([*total, entry["step_samples"]])
            played = entry["values"].setdefault("rollout", [])
            before, started, cpu = workers_cpu(trainer), time.perf_counter(), time.process_time()
            _, stats = roll_out(len(played))
            took = time.perf_counter() - started, time.process_time() - cpu
            played.append([*(round(t, 5) for t in took), stats.num_steps])
            workers = [round(stats.environment_time, 5), round(workers_cpu(trainer) - before, 5), stats.num_steps]
            entry["values"].setdefault("environments", []).append(workers)


def summarize(entries: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Row -> point -> CPU microseconds of a step sample (or forwarded token), by the first point's; and by wall."""
    rows: dict[str, dict[str, list[float]]] = {}
    for name, entry in entries.items():
        per_step = {phase: [[w / s, c / s] for w, c, s in v] for phase, v in entry["values"].items()}
        whole = [per_step[phase] for phase in ("advantages", "batch", "logps", "update")]
        per_step["these four"] = [[sum(part) for part in zip(*times)] for times in zip(*whole)]
        tokens = entry["forwarded_tokens"] / entry["step_samples"]
        for phase in ("logps", "update"):
            per_step[f"{phase}, of a token"] = [[w / tokens, c / tokens] for w, c in per_step[phase]]
        for row, times in per_step.items():
            wall, cpu = (1e6 * median(part) for part in zip(*times))
            rows.setdefault(row, {})[name] = [cpu, wall]
    for row in rows.values():
        cpu, wall = next(iter(row.values()))
        row.update({name: [round(c, 2), round(c / cpu, 3), round(w / wall, 3)] for name, (c, w) in row.items()})
    return rows


def print_series(series: str, entries: dict[str, Any], rows: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n{series:20}" + "".join(f"{name:>24}" for name in entries))
    repetitions = [len(entry["values"]["update"]) for entry in entries.values()]
    each = [e["step_samples"] / e["iterations"] for e in entries.values()]
    tokens = [e["forwarded_tokens"] / e["step_samples"] for e in entries.values()]
    for label, cells in (("repetitions", repetitions), ("samples an iteration", each), ("tokens a sample", tokens)):
        print(f"{label:20}" + "".join(f"{cell:24.5g}" for cell in cells))
    for label, row in rows.items():
        print(f"{label:20}" + "".join(f"{c:10.2f} {ratio:6.2f} [{wall:4.2f}]" for c, ratio, wall in row.values()))
        off = [f"{name}: {ratio:.2f}" for name, (_, ratio, _) in row.items() if abs(ratio - 1) > LIMIT]
        if off:
            print(f"{'':20}  not within 15 %: {', '.join(off)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--series", default="episodes,turns")
    parser.add_argument("--episodes", type=int, default=128, help="of the largest point, a multiple of 64")
    parser.add_argument("--turn_episodes", type=int, default=16, help="of the series of turns, a multiple of 8")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--max_tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"commands": [], "series": {}}
    for series in options.series.split(","):
        with tempfile.TemporaryDirectory() as folder:
            trainer, tasks = make_trainer(Path(folder), options.episodes, options.max_tokens)
            if series == "episodes":
                points = episode_points(trainer, tasks)
            else:
                points = turn_points(trainer, tasks[: options.turn_episodes], Manifest.scan(Path(folder) / "games"))
            measure(trainer, points, results["series"].setdefault(series, {}), options)
            trainer.close()
    seeds = {"games": 0, "sampling": trainer.args.seed}
    found = facts("torch", "transformers", "trl", "numpy", seeds=seeds)
    results["commands"].append(found.pop("command"))
    results |= {
        **found,
        "CPU us a step sample or token, by the first point's, wall by the first point's": {
            series: summarize(entries) for series, entries in results["series"].items()
        },
    }
    write_results(options.output, results)
    print(json.dumps({key: results[key] for key in ("commands", "machine", "versions", "seeds")}, indent=1))
    for series, entries in results["series"].items():
        print_series(series, entries, summarize(entries))


if __name__ == "__main__":
    main()
