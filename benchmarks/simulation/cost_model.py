"""Seconds of an iteration by phase, predicted from unit costs (`costs.py`): for GPUs and episodes not run here.

    python -m benchmarks.simulation.cost_model --output FOLDER [--repetitions 1] [--reply_tokens 150] ...

1. Calibration, on a CPU: iterations of the tiny model on generated ALFWorld games, each point on games of its own; and
   gathering and planning of synthetic step samples as long as the paper's, for 1, 8 and 64 ranks, in one process. Unit
   costs are fitted to some of the points and checked on the others. A second call with the same output adds its
   repetitions; `--repetitions 0` takes those that are there. Other jobs may share the machine: seconds are CPU seconds
   of the process that does the work (one thread), medians of the repetitions.
2. Tables for Qwen2.5. What a GPU does is assumed (`Gpu`, each assumption an option), and so are the episodes; what the
   host does (prompts, graph, gathering, planning) is as measured in 1.; an environment's step and reset are those of
   official ALFWorld games in benchmarks/results/pool. No GPU has confirmed these numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.common import facts, write_results
from benchmarks.simulation.costs import (
    PHASES,
    VLLM_SHARE,
    Gpu,
    UnitCosts,
    Work,
    advantages,
    batch,
    environment,
    gather,
    gathered_bytes,
    generation,
    gpu_costs,
    iteration,
    limits,
    logps,
    longest_environment_step,
    prompts,
    update,
    waiting,
)
from benchmarks.speed.growth import clock, phases, play, workers_cpu
from benchmarks.speed.phases import make_trainer
from g2po_trl.update.batch import BatchingConfig, StepBatch, make_mini_batches

FITS: dict[str, tuple[tuple[Callable[[Work, UnitCosts], float], ...], tuple[str, ...]]] = {
    "generation": ((generation, waiting), ("prompt_token", "generated_token", "decode_pass")),
    "environment": ((environment,), ("reset", "environment_step")),
    "prompts": ((prompts,), ("played_turn", "built_prompt", "built_token")),
    "advantages": ((advantages,), ("graph", "graph_step")),
    "gather": ((gather,), ("pickled_step", "unpickled_step", "unpickled_byte")),
    "batch": ((batch,), ("planned_step", "planned_token", "collated_step", "collated_token")),
    "logps": ((logps,), ("scored_token",)),
    "update": ((update,), ("updated_token",)),
}
# (episodes, turns, prompt) of an iteration; (episodes, ranks, prompt tokens, completion tokens) of a planning.
PLAYED = {
    "fit": [(16, 10, "compact"), (32, 15, "compact"), (48, 15, "compact"), (16, 30, "compact"), (16, 10, "full")],
    "check": [(96, 15, "compact"), (32, 30, "compact"), (24, 15, "full")],
}
PLANNED = {
    "fit": [
        (64, 1, 700, 150),
        (256, 1, 700, 150),
        (64, 1, 300, 60),
        (64, 8, 700, 150),
        (256, 8, 700, 150),
        (128, 8, 300, 60),
        (64, 8, 1500, 300),
    ],
    "check": [(512, 1, 700, 150), (512, 8, 700, 150), (512, 64, 700, 150), (128, 8, 1000, 200)],
}
SMALLER = {"96 episodes, 15 turns, compact prompt": "48 episodes, 15 turns, compact prompt"}
Point = dict[str, Any]  # "use", "work" and "seconds" by phase


def fit(phase: str, points: Sequence[Point]) -> dict[str, float]:
    """Unit costs of a phase: least squares of relative errors, none below 0."""
    parts, names = FITS[phase]
    units = [UnitCosts(**{name: 1.0}) for name in names]
    known = [(Work(**p["work"]), median(p["seconds"][phase])) for p in points if phase in p["seconds"]]
    rows = np.array([[sum(part(w, unit) for part in parts) / s for unit in units] for w, s in known])
    scale, kept = np.linalg.norm(rows, axis=0), list(range(len(names)))
    while True:
        costs, *_ = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)
        if (costs >= 0).all():
            return dict.fromkeys(names, 0.0) | {names[i]: cost / scale[i] for i, cost in zip(kept, costs)}
        kept.pop(int(costs.argmin()))


def play_iteration(trainer, tasks: list[dict[str, Any]], turns: int) -> tuple[Work, dict[str, float]]:
    """What an iteration had to do, and CPU seconds of its phases."""
    generate, generating = trainer.player.actor.engine.generate, 0.0

    def timed(*args):
        nonlocal generating
        generating += clock(lambda: completions.append(generate(*args)))[1]
        return completions.pop()

    completions: list[Any] = []
    trainer.player.actor.engine.generate = timed
    torch.manual_seed(0)  # the same episodes at every repetition
    in_workers, started = workers_cpu(trainer), time.process_time()
    trajectories, stats = play(trainer, trainer.player.pool, tasks, turns)
    playing, in_workers = time.process_time() - started, workers_cpu(trainer) - in_workers
    del trainer.player.actor.engine.generate
    runs, facts = phases(trainer, [trajectories[i : i + 8] for i in range(0, len(tasks), 8)])
    by_turn = [[len(t.steps[i].completion_ids) for t in trajectories if i < len(t.steps)] for i in range(stats.turns)]
    tokens = stats.prompt_tokens + stats.generated_tokens
    work = Work(
        episodes=len(tasks),
        turns=stats.turns,
        active=stats.active_fraction,
        prompt_tokens=stats.prompt_tokens / stats.num_steps,
        reply_tokens=stats.generated_tokens / stats.num_steps,
        longest_reply=sum(map(max, by_turn)) / stats.turns,
        decoded_tokens=sum(len(completions) * max(completions) for completions in by_turn) / stats.num_steps,
        forwarded=facts["forwarded_tokens"] / tokens,
        passes=1,
        slices=1,
        micro_batch_tokens=trainer.args.max_tokens_per_micro_batch,
        workers=trainer.player.pool.num_workers,
    )
    seconds = {
        "generation": generating,
        "environment": in_workers * work.busiest_worker / work.episodes,
        "prompts": playing - generating,
    }
    return work, seconds | {name: clock(run, 0.1)[1] for name, run in runs.items()}


def plan(episodes: int, ranks: int, prompt: int, completion: int) -> tuple[Work, dict[str, float]]:
    """The same of gathering and of micro-batches, on synthetic step samples: 33 steps an episode over 60 pages a
    group, a seventh of a prompt the same in all of them."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(episodes // 8):
        pages = rng.integers(150_000, size=(60, prompt), dtype=np.int32)
        pages[:, : prompt // 7] = pages[0, : prompt // 7]
        rows += [pages[page] for page in rng.integers(60, size=8 * 33)]
    completions = list(rng.integers(150_000, size=(len(rows), completion), dtype=np.int32))
    parts = [
        StepBatch(rows[r], completions[r], np.zeros(len(rows[r]), np.float32), np.ones(len(rows[r]), bool))
        for r in (slice(len(rows) * i // ranks, len(rows) * (i + 1) // ranks) for i in range(ranks))
    ]
    work = Work(episodes, ranks, turns=33, active=1.0, prompt_tokens=prompt, reply_tokens=completion)
    made: list[Any] = []

    def cut() -> None:
        options = BatchingConfig(work.slices, work.micro_batch_tokens, "dapo", 0, layout="shared")
        made[:] = make_mini_batches(parts, 0, options, np.random.default_rng(0))

    seconds = {"batch": median(clock(cut)[1] for _ in range(5))}
    work = replace(work, forwarded=float(made[1]["update/forwarded_tokens"]) / (len(rows) * (prompt + completion)))
    if ranks > 1:
        sent = [pickle.dumps([part]) for part in parts]
        sending = [clock(lambda: pickle.dumps([parts[0]]))[1] for _ in range(5)]
        receiving = [clock(lambda: [pickle.loads(part) for part in sent])[1] for _ in range(5)]
        seconds["gather"] = median(sending) + median(receiving)
        seconds["step_bytes"] = sum(map(len, sent)) / len(rows) - 4 * (prompt + completion)
    return work, seconds


def measure(points: dict[str, Point]) -> None:
    """One repetition of every point."""

    def add(name: str, use: str, work: Work, seconds: dict[str, float]) -> None:
        point = points.setdefault(name, {"use": use, "work": asdict(work), "seconds": {}})
        for phase, value in seconds.items():
            point["seconds"].setdefault(phase, []).append(round(value, 6))

    for use, plans in PLANNED.items():
        for arguments in plans:
            add("plan {} episodes, {} ranks, {}+{} tokens".format(*arguments), use, *plan(*arguments))
    for prompt in ("compact", "full"):
        chosen = [(use, e, t) for use, made in PLAYED.items() for e, t, wording in made if wording == prompt]
        with tempfile.TemporaryDirectory() as folder:
            trainer, tasks = make_trainer(Path(folder), 16 + sum(e for _, e, _ in chosen), prompt=prompt)
            play_iteration(trainer, tasks[-16:], 2)  # starts two workers
            for use, episodes, turns in chosen:
                own, tasks = tasks[:episodes], tasks[episodes:]
                name = f"{episodes} episodes, {turns} turns, {prompt} prompt"
                add(name, use, *play_iteration(trainer, own, turns))
            trainer.close()


def calibrate(points: dict[str, Point]) -> tuple[UnitCosts, list[list[Any]]]:
    """Unit costs from the points to fit; and [point, phase, predicted, measured, relative error] of the others."""
    fitted = [point for point in points.values() if point["use"] == "fit"]
    costs = UnitCosts(
        **{name: float(value) for phase in FITS for name, value in fit(phase, fitted).items()},
        step_bytes=max(p["seconds"]["step_bytes"][0] for p in fitted if "step_bytes" in p["seconds"]),
    )
    checks = []
    for name, point in points.items():
        if point["use"] != "check":
            continue
        works = {"": Work(**point["work"])}
        if name in SMALLER:  # its workload not known either
            works[f", by {SMALLER[name]}"] = replace(
                Work(**points[SMALLER[name]]["work"]), episodes=works[""].episodes
            )
        for known, work in works.items():
            rows = []
            for phase in point["seconds"].keys() & FITS.keys():
                predicted = sum(part(work, costs) for part in FITS[phase][0])
                rows.append([phase, predicted, median(point["seconds"][phase])])
            if len(rows) == len(FITS) - 1:
                rows.append(["all", *(sum(column) for column in list(zip(*rows))[1:])])
            checks += [[name + known, *row, row[1] / row[2] - 1] for row in sorted(rows)]
    return costs, checks


def predict(options: argparse.Namespace, gpu: Gpu, host: UnitCosts) -> list[dict[str, Any]]:
    rows = []
    for shape in VLLM_SHARE:
        for ranks in (1, 8, 64):
            for episodes in (128, 512, 2048, 8192):
                names = ("turns", "active", "prompt_tokens", "reply_tokens", "longest_reply", "forwarded")
                w = Work(episodes, ranks, workers=gpu.cores, **{name: getattr(options, name) for name in names})
                c = gpu_costs(shape, gpu, w, host)
                row = {"model": shape, "gpus": ranks, "environments": episodes, "seconds": iteration(w, c)}
                step = longest_environment_step(w, c)
                row |= {"total": sum(row["seconds"].values()), "limits": limits(shape, gpu, w, c)}
                rows.append(row | {"gathered_gb": gathered_bytes(w, c) / 1e9, "longest_environment_step": step})
    return rows


def report(results: dict[str, Any]) -> None:
    print("\nunit costs measured here (s; bytes):", json.dumps(results["unit costs"]))
    print("\npredicted and measured CPU seconds, points that were not fitted")
    for name, phase, predicted, measured, error in results["checks"]:
        print(f"{name:80} {phase:12} {predicted:9.3f} {measured:9.3f} {error:+7.1%}")
    for phase in (*FITS, "all"):
        errors = [abs(row[4]) for row in results["checks"] if row[1] == phase]
        print(f"{phase}: median error {median(errors):.1%}, largest {max(errors):.1%}")
    print("\nseconds of an iteration on GPUs, predicted")
    print(
        f"{'model':6}{'GPUs':>5}{'envs':>6}{'all':>9}"
        + "".join(f"{p.__name__[:9]:>10}" for p in PHASES)
        + f"{'gathered':>10}{'step as long':>14}  beyond a limit"
    )
    for row in results["predictions"]:
        print(
            f"{row['model']:6}{row['gpus']:5}{row['environments']:6}{row['total']:9.1f}"
            + "".join(f"{value:10.2f}" for value in row["seconds"].values())
            + f"{row['gathered_gb']:7.2f} GB{row['longest_environment_step']:12.2f} s  {'; '.join(row['limits'])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=1)
    for name in ("turns", "active", "prompt_tokens", "reply_tokens", "longest_reply", "forwarded"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Work, name))
    for field in fields(Gpu):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--environment_step", type=float, default=3.6e-3, help="see benchmarks/results/pool")
    parser.add_argument("--reset", type=float, default=33e-3, help="likewise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"commands": [], "points": {}}
    for _ in range(options.repetitions):
        measure(results["points"])
    costs, checks = calibrate(results["points"])
    gpu = Gpu(**{field.name: getattr(options, field.name) for field in fields(Gpu)})
    host = replace(costs, environment_step=options.environment_step, reset=options.reset)
    found = facts("torch", "transformers", "numpy")
    results["commands"].append(found.pop("command"))
    results |= {
        **found,
        "unit costs": asdict(costs),
        "assumed": asdict(gpu) | {"environment_step": options.environment_step, "reset": options.reset},
        "checks": [[name, phase, *(round(value, 4) for value in numbers)] for name, phase, *numbers in checks],
        "predictions": predict(options, gpu, host),
    }
    write_results(options.output, results)
    report(results)


if __name__ == "__main__":
    main()
