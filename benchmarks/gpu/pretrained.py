"""The comparison's stages with SmolLM2, their runs side by side on one GPU.

    python -m benchmarks.gpu.pretrained --output OUTPUT --start TAUGHT --stages treasure smollm2-pilot --seconds 300
    python -m benchmarks.gpu.pretrained --output OUTPUT --start TAUGHT --stages smollm2 --winner LoRA --seconds 400
    python -m benchmarks.gpu.pretrained --output OUTPUT --start TAUGHT --stages smollm2-methods --seconds 450 -- \
        --eval_before false --eval_steps 30

The runs are those of `benchmarks/learning/comparison_stages.py`, with these differences: bfloat16 arithmetic, larger
micro-batches, rollouts by vLLM (unless `--generate`), panels of 96 games played twice, also at 0.4, by the run
itself instead of by `g2po evaluate` afterwards, no checkpoints, and an end when time is up, but none at 20 points.
`smollm2-methods` is played on a GPU alone: `smollm2` with all weights trained, by four methods with eight other seeds;
`--seeds` chooses. OUTPUT/results.json is written again whenever a run has come on, OUTPUT/table.md at the end. Wheels
and paths are given as to `run.py`. With NVIDIA's Multi-Process Service (`nvidia-cuda-mps-control -d`), the runs'
kernels share the GPU instead of taking turns. `--shrink` plays the smallest of these runs; with `--generate` and the
tiny model as the start it needs no GPU. `smollm2-rooms` (30 turns, 60 iterations) has never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu.jobs import (
    Job,
    Report,
    absolute_path,
    commit,
    failed,
    lay_paths,
    machine,
    port_of,
    run,
    write_page,
)
from benchmarks.gpu.run import ENDING, USE_VLLM, VLLM_OPTIONS
from benchmarks.learning import comparison_stages as stages

METHODS = "smollm2-methods"
STAGES = ("treasure", "smollm2-pilot", *stages.AFTER_PILOT, METHODS)
SEEDS = range(200, 208)
GAMES = 96
LEFT_OUT = ("--bf16", "--num_eval_games", "--eval_before", "--num_environment_workers", "--save_total_limit")


def methods() -> list[stages.Job]:
    """Return the runs of `smollm2-methods`: seeds outside, so that those of one seed are balanced."""
    arms = {arm: (*stages.PILOT["full weights"], *stages.ARMS[arm]) for arm in stages.TREASURE_ARMS}
    jobs = stages.smollm2("smollm2", arms, (15, 30, 45))[1:]
    ones = [replace(job, stage=METHODS) for job in jobs if job.seed == jobs[0].seed]
    return [replace(job, seed=seed) for seed in SEEDS for job in ones]


def jobs_of(names: list[str], winner: str | None) -> list[stages.Job]:
    """Return the runs of the stages; the start is played by the runs themselves."""
    planned = stages.jobs_of([name for name in names if name != METHODS], winner)
    return [job for job in planned if job.arm != stages.START] + (methods() if METHODS in names else [])


def flags_of(job: stages.Job, args: argparse.Namespace, workers: int) -> list[str]:
    """Return the flags of a run on a GPU; what the comparison sets for a CPU is left out."""
    words = [word.replace(stages.TAUGHT, str(args.start)) for word in job.words[1:]]
    words = [word.replace(stages.GAME, str(args.work / "treasure.py")) for word in words]
    for name in LEFT_OUT:
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    words += ["--bf16", "true", "--save_strategy", "no", "--overwrite", "--num_environment_workers", str(workers)]
    words += ["--max_tokens_per_micro_batch", str(args.tokens), "--seed", str(job.seed)]
    words += ["--max_steps", str(job.until[-1]), "--disable_tqdm", "true"]
    if games := min(job.games, GAMES):  # of ALFWorld
        words += ["--num_eval_games", str(games), "--num_generations_eval", "2", "--cache_dir", str(args.cache_dir)]
        words += ["--eval_temperature", "1.0", "--other_eval_temperatures", "0.4"]
        words += ["--per_device_eval_batch_size", str(2 * games)]
        if len(job.until) > 1:
            words += ["--eval_strategy", "steps", "--eval_steps", str(job.until[0])]
    if not args.generate:
        words += USE_VLLM
    return words


def command_of(job: stages.Job, args: argparse.Namespace, workers: int, name: str | None = None) -> list[str]:
    """Return the program that plays a run; `name`: of its files."""
    name = name or f"{job.stage}-{job.name}"
    words = [sys.executable, "-m", "benchmarks.gpu.learning", "--recipe", Path(job.words[0]).stem]
    words += ["--findings", str(args.output / f".{name}.jsonl"), "--seconds", f"{args.seconds - ENDING:.0f}"]
    if job.reach is not None:
        words += ["--reach", str(job.reach), "--every", str(job.until[0])]
    if not args.generate:
        words += ["--vllm_options", json.dumps(VLLM_OPTIONS)]
    words += ["--panels_take", str(args.panels_take)]
    return [*words, *flags_of(job, args, workers), "--output_dir", str(args.work / name)]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=absolute_path, required=True, help="results.json and a log of each run")
    parser.add_argument("--start", type=absolute_path, required=True, help="SmolLM2 as `g2po teach alfworld` made it")
    parser.add_argument("--stages", nargs="+", choices=STAGES, required=True)
    parser.add_argument("--winner", choices=stages.PILOT, help="of the pilot; the stages after it need one")
    parser.add_argument("--seconds", type=float, required=True, help="for all runs, which are side by side")
    parser.add_argument("--arms", nargs="+", help="default: all of the stages")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all of the stages")
    parser.add_argument("--shrink", action="store_true", help="the smallest runs, to see that they run")
    parser.add_argument("--generate", action="store_true", help="rollouts by transformers' generate")
    parser.add_argument("--tokens", type=int, default=3072, help="of a micro-batch")
    parser.add_argument("--panels_take", type=float, default=0.0, help="seconds of the panels, until one was played")
    parser.add_argument("--max_steps", type=int, help="optimizer steps of each run; default: the stage's")
    parser.add_argument("--wheels", type=absolute_path, help="folder of wheels that are not installed here")
    parser.add_argument("--work", type=absolute_path, required=True, help="folder of the runs")
    parser.add_argument("--cache_dir", type=absolute_path, required=True, help="folder of generated games")
    parser.add_argument("--port", type=int, default=29500, help="the first of as many ports as there are runs")
    parser.add_argument("extra", nargs="*", help="after --: further flags of every recipe")
    args = parser.parse_args(given)
    if not (args.start / "config.json").is_file():
        parser.error(f"--start is {str(args.start)!r}, which holds no model: name a folder with its config.json")
    if set(args.stages) & set(stages.AFTER_PILOT) and args.winner is None:
        parser.error("--winner is not given: name the arm of smollm2-pilot that was ahead")
    return args


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for folder in (args.output, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    (script,) = re.findall(r"```python\n(.*?)```", (common.ROOT / "README.md").read_text(), re.DOTALL)
    (args.work / "treasure.py").write_text(script)
    jobs = [
        stages.smoke(job) if args.shrink else job
        for job in jobs_of(args.stages, args.winner)
        if (args.arms is None or job.arm in args.arms) and (args.seeds is None or job.seed in args.seeds)
    ]
    if not jobs:
        every = jobs_of(args.stages, args.winner)
        known = sorted({job.arm for job in every}), sorted({job.seed for job in every})
        sys.exit(
            f"--arms {args.arms} --seeds {args.seeds}: no such run. There are the arms {known[0]} and seeds {known[1]}"
        )
    cores = max(1, (os.cpu_count() or 1) // max(1, len(jobs)))
    environment = {"OMP_NUM_THREADS": str(cores), **lay_paths(args.work, args.wheels)}
    workers = max(1, cores - 1)
    content: dict[str, Any] = {
        "command": common.command(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "machine": machine(environment),
        "shrink": args.shrink,
        "side by side": len(jobs),
        "rollouts by": "generate" if args.generate else "vllm",
        "runs": {f"{job.stage}-{job.name}": {"stage": job.stage, "arm": job.arm, "seed": job.seed} for job in jobs},
        "parts": {},
    }
    report, started = Report(args.output / "results.json", content), []
    for number, job in enumerate(jobs):
        command = command_of(job, args, workers) + args.extra
        if args.max_steps is not None:
            command += ["--max_steps", str(args.max_steps)]
        started.append(
            Job(
                f"{job.stage}-{job.name}",
                command,
                args.output,
                args.seconds,
                {**environment, **port_of(number, args.port)},
            )
        )
    run(started, report)
    write_page(report)
    if names := failed(content["parts"]):
        sys.exit(f"failed: {', '.join(names)}; see the logs in {args.output}")


if __name__ == "__main__":
    main()
