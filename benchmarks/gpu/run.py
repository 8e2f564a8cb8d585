"""What can only be found out on a GPU, by one command and in minutes.

    python -m benchmarks.gpu.run --output OUTPUT [--minutes 9] [--parts tests phases …] [--start FOLDER] …
    python -m benchmarks.gpu.run --output OUTPUT --shrink    # everything tiny, also without a GPU

It needs torch, transformers, accelerate, peft and pytest, and this checkout, which need not be installed. What else it
imports may lie on PYTHONPATH. vLLM, with `--vllm`, must fit the PyTorch there; without flashinfer, set
`VLLM_USE_FLASHINFER_SAMPLER=0`.

Parts, in turn and each with a limit of its own; what one leaves of its time the next ones have:

    tests            those marked `gpu`: exactness of layouts and attentions, bfloat16, training, memory of recipes
    phases           log-probabilities and update of Qwen2.5-1.5B (random weights) at the paper's batch; also
    phases-conversations, phases-hybrid: of conversations, and of Qwen3.5-0.8B's shape (`phases.py`)
    teach            SmolLM2-135M learns the completion's format; left out with `--start`
    treasure, smollm2-pilot, smollm2, smollm2-rooms: stages of `benchmarks/learning/stages.py`, their runs side by side
    smollm2-methods  `smollm2` with all weights trained, by four methods with seeds 200 to 207; see `--arms`, `--seeds`
    repeat           whether a run repeats to the bit: two pairs of six iterations, the second with vLLM's
                     `VLLM_BATCH_INVARIANT=1` and deterministic kernels in the trainer (`digests.py`)

Runs differ from those of the comparison on CPUs: bfloat16 arithmetic, larger micro-batches, panels of 96 games played
twice, also at 0.4, by the run itself, no checkpoints, and an end when time is up, but none at 20 points. With NVIDIA's
Multi-Process Service (`nvidia-cuda-mps-control -d`), their kernels share the GPU instead of taking turns.

OUTPUT/results.json is written again whenever a part has found something, OUTPUT/PART.log all along, OUTPUT/table.md at
the end. The exit status is 1 if a part crashed or a test failed; running out of time is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu.jobs import Job, Report, commit, failed, lay_paths, machine, read_lines, run, write_page
from benchmarks.learning import stages

ROOT = common.ROOT
METHODS, REPEAT = "smollm2-methods", "repeat"
PHASES = {
    "phases": [],
    "phases-conversations": ["--conversations"],
    "phases-hybrid": ["--hybrid", "--conversations"],
}
LEARNING = ("treasure", "smollm2-pilot", *stages.AFTER_PILOT, METHODS, REPEAT)
PARTS = ("tests", *PHASES, "teach", *LEARNING)
DEFAULT = ("tests", "phases", "teach", METHODS)
SHARES = {"tests": 0.4, "teach": 0.45, **dict.fromkeys(PHASES, 0.4)}  # of what is left when the part begins
ENDING = 8.0  # seconds, for a part that does not end by itself and for the table
TINY = ROOT / "envs/alfworld/tiny_model"
SEEDS, GAMES, ITERATIONS = range(200, 208), 96, 6  # of `smollm2-methods`, of a panel, of `repeat`
LEFT_OUT = ("--bf16", "--num_eval_games", "--eval_on_start", "--num_environment_workers", "--save_total_limit")

# For several vLLM on one GPU. One that measures how much is free counts what others take meanwhile as its own.
VLLM_OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1_500_000_000, "max_num_seqs": 192}
# Few CUDA graphs: capturing those of all sizes takes longer, and many processes do it at once.
VLLM_OPTIONS["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192]}
USE_VLLM = ("--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.05")
# On Hopper vLLM asks cuBLAS for these workspaces, but after the trainer's model has been on the GPU.
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
PAIRS: dict[str, dict[str, str]] = {"usual": {}, "invariant": {"VLLM_BATCH_INVARIANT": "1", **CUBLAS}}
KINDS = ("prompts", "completions", "sampled log-probabilities", "log-probabilities", "weights", "loss", "grad_norm")


def limit_of(part: str, left: float, parts: Sequence[str]) -> float:
    """Return the seconds a part may take of those that are left; the last part takes all of them."""
    return max(0.0, (left - ENDING) * (1.0 if part == parts[-1] else SHARES.get(part, 0.5)))


def methods() -> list[stages.Job]:
    """Return the runs of `smollm2-methods`: seeds outside, so that those of one seed are balanced."""
    arms = {arm: (*stages.PILOT["full weights"], *stages.ARMS[arm]) for arm in stages.TREASURE_ARMS}
    jobs = stages.smollm2("smollm2", arms, (15, 30, 45), *stages.FEW, *stages.FLOAT32)[1:]
    ones = [replace(job, stage=METHODS) for job in jobs if job.seed == jobs[0].seed]
    return [replace(job, seed=seed) for seed in SEEDS for job in ones]


def runs_of(stage: str, args: argparse.Namespace) -> list[stages.Job]:
    """Return the runs of a stage; the start is played by the runs themselves."""
    jobs = methods() if stage in (METHODS, REPEAT) else stages.jobs_of([stage], args.winner)
    jobs = [
        stages.smoke(job) if args.shrink else job
        for job in jobs
        if job.arm != stages.START
        and (args.arms is None or job.arm in args.arms)
        and (args.seeds is None or job.seed in args.seeds)
    ]
    if not jobs:
        sys.exit(f"--arms {args.arms} --seeds {args.seeds}: {stage} has no such run")
    return jobs


def flags_of(job: stages.Job, args: argparse.Namespace, start: Path, workers: int) -> list[str]:
    """Return the words of a run on a GPU; what the comparison sets for a CPU is left out."""
    words = [word.replace(stages.TAUGHT, str(start)) for word in job.words]
    words = [word.replace(stages.GAME, str(args.work / "treasure.py")) for word in words]
    for name in LEFT_OUT:
        while name in words:
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
    return [*words, *(USE_VLLM if args.vllm else [])]


def learning(
    stage: str, args: argparse.Namespace, start: Path, seconds: float, environment: Mapping[str, str]
) -> list[Job]:
    """Return the processes of a stage, which run side by side."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/your_environment.md").read_text(), re.DOTALL)
    (args.work / "treasure.py").write_text(script)
    runs = runs_of(stage, args)
    planned = {f"{stage}-{job.name}": (job, [], {}) for job in runs}
    if stage == REPEAT:
        short = [
            "--eval_on_start",
            "false",
            "--eval_strategy",
            "no",
            "--max_steps",
            str(2 if args.shrink else ITERATIONS),
        ]
        short += ["--num_eval_games", "8", "--num_generations_eval", "1"]  # nobody reads it
        planned = {f"{pair}-{letter}": (runs[0], short, PAIRS[pair]) for pair in PAIRS for letter in "ab"}
    cores = max(1, (os.cpu_count() or 1) // len(planned))
    found = []
    for number, (name, (job, more, variables)) in enumerate(planned.items()):
        options = ["--findings", args.output / f".{name}.jsonl", "--until", f"{time.time() + seconds - ENDING:.0f}"]
        options += ["--panels_take", args.panels_take]
        options += ["--reach", job.reach, "--every", job.until[0]] if job.reach is not None else []
        options += ["--vllm_options", json.dumps(VLLM_OPTIONS)] if args.vllm else []
        options += ["--digests", args.output / f"{name}.digests"] if stage == REPEAT else []
        options += ["--deterministic"] if variables else []
        words = [*options, *flags_of(job, args, start, max(1, cores - 1)), *more, *args.extra]
        command = [sys.executable, "-m", "benchmarks.gpu.learning", *words, "--output_dir", args.work / name]
        # A port that was free when one asked may be another's by now.
        own = {"OMP_NUM_THREADS": str(cores), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port + number)}
        found.append(Job(name, list(map(str, command)), args.output, seconds, {**environment, **own, **variables}))
    return found


def teach(args: argparse.Namespace) -> list[str]:
    """Return the command that teaches the completion's format."""
    words = ["teach", "alfworld", "--output_dir", args.work / "start", "--cache_dir", args.cache_dir]
    words += ["--validation_steps", sys.maxsize, "--save_strategy", "no", "--disable_tqdm", "true"]  # one, at the end
    words += ["--overwrite", "--model_name_or_path", args.model] if args.model else ["--overwrite"]
    if args.shrink:
        words += ["--num_games", "16", "--num_demonstrations", "16", "--num_validation_tasks", "4", "--max_turns", "2"]
    return [sys.executable, "-m", "g2po_trl", *map(str, words)]


def jobs_of(part: str, args: argparse.Namespace, seconds: float, environment: Mapping[str, str]) -> list[Job]:
    """Return the processes of a part."""
    if part in LEARNING:
        taught = args.work / "start"
        start = args.start or (taught if (taught / "teaching.json").is_file() else None)
        if start is None:
            sys.exit(f"{part} has no start: pass --start, or the part teach")
        return learning(part, args, start, seconds, environment)
    if part == "teach":
        command = teach(args)
    elif part == "tests":
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests/gpu/test_gpu.py"), "-m", "gpu", "-q"]
        command += ["-p", "benchmarks.gpu.report", "-p", "no:cacheprovider"]
    else:
        command = [sys.executable, "-m", "benchmarks.gpu.phases", *PHASES[part]]
        command += ["--findings", str(args.output / f".{part}.jsonl"), "--seconds", f"{max(5.0, seconds - 30):.0f}"]
        command += [
            *(["--turns", str(args.turns)] if part == "phases" else []),
            *(["--shrink"] if args.shrink else []),
        ]
    return [Job(part, command, args.output, seconds, environment)]


def equal_until(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return by kind the number of iterations, from the first on, in which both runs have the same."""
    found = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for a, b in zip(one, other):
            if kind not in a or a[kind] != b.get(kind):
                break
            found[kind] += 1
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def absolute(text: str) -> Path:
        """Return a path as the user means it: the parts run elsewhere."""
        return Path(text).expanduser().absolute()

    parser.add_argument("--output", type=absolute, required=True, help="results.json, table.md and logs")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help=f"default: {' '.join(DEFAULT)}, of one seed")
    parser.add_argument("--start", type=absolute, help="a taught model, as `g2po teach alfworld` makes it")
    parser.add_argument("--model", type=absolute, help="the model that is taught; default: SmolLM2-135M, fetched")
    parser.add_argument("--winner", choices=stages.PILOT, help="of the pilot; the stages after it need one")
    parser.add_argument("--arms", nargs="+", help="of the stages; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the stages; default: all")
    parser.add_argument("--vllm", action="store_true", help="rollouts by vLLM, which must be installed")
    parser.add_argument("--tokens", type=int, default=3072, help="of a run's micro-batch")
    parser.add_argument("--turns", type=int, default=6, help="of an episode in `phases`; the paper's have up to 50")
    parser.add_argument("--panels_take", type=float, default=0.0, help="seconds of the panels, until one was played")
    parser.add_argument("--work", type=absolute, help="folder for models and runs; default: a temporary one")
    parser.add_argument("--cache_dir", type=absolute, help="folder of generated games and SmolLM2; default: in --work")
    parser.add_argument("--port", type=int, default=29500, help="the first of as many ports as there are runs")
    parser.add_argument("--shrink", action="store_true", help="everything tiny, to see that it runs")
    parser.add_argument("extra", nargs="*", help="after --: further flags of every run")
    args = parser.parse_args(words)
    if args.parts is None:
        args.parts, args.arms, args.seeds = list(DEFAULT), args.arms or ["g2po", "grpo"], args.seeds or [SEEDS[0]]
    args.parts.sort(key=PARTS.index)
    for name in ("start", "model"):
        path = getattr(args, name)
        if path and not (path / "config.json").is_file():
            parser.error(f"--{name} is {str(path)!r}, which holds no model: name a folder with its config.json")
    if set(args.parts) & set(stages.AFTER_PILOT) and args.winner is None:
        parser.error("--winner is not given: name the arm of smollm2-pilot that was ahead")
    args.model = args.model or (TINY if args.shrink else None)
    return args


def play(args: argparse.Namespace, begun: float) -> Report:
    """Run all parts."""
    environment = lay_paths(args.work)
    content = {
        "command": common.command(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "minutes": args.minutes,
        "shrink": args.shrink,
        "rollouts by": "vllm" if args.vllm else "generate",
        "machine": machine(environment),
        "runs": {},
        "parts": {},
    }
    report = Report(args.output / "results.json", content)
    report.write()
    parts = [part for part in args.parts if not (part == "teach" and args.start)]
    for part in parts:
        seconds = limit_of(part, 60 * args.minutes - (time.monotonic() - begun), parts)
        if part in LEARNING and part != REPEAT:
            named = {f"{part}-{job.name}": job for job in runs_of(part, args)}
            content["runs"] |= {name: {"stage": part, "arm": job.arm, "seed": job.seed} for name, job in named.items()}
        jobs = jobs_of(part, args, seconds, environment)
        run(jobs, report)
        if part == REPEAT:
            digests = {job.name: read_lines(args.output / f"{job.name}.digests") for job in jobs}
            both = {pair: (digests[f"{pair}-a"], digests[f"{pair}-b"]) for pair in PAIRS}
            content["digests"] = digests
            content["equal until"] = {
                pair: {"of": min(map(len, two)), **equal_until(*two)} for pair, two in both.items()
            }
            report.write()
    return report


def main() -> None:
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs, as Ctrl-C does
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        args.work = args.work or Path(scratch)
        args.cache_dir = args.cache_dir or args.work / "cache"
        for folder in (args.output, args.work):
            folder.mkdir(parents=True, exist_ok=True)
        report = play(args, begun)
    write_page(report)
    if names := failed(report.content["parts"]):
        sys.exit(f"failed: {', '.join(names)}; see the logs in {args.output}")


if __name__ == "__main__":
    main()
