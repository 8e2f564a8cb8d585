"""Does a run repeat to the bit? Two pairs of SmolLM2 runs of six iterations, and the start's panels, side by side.

    python -m benchmarks.gpu.repeat --output OUTPUT --start TAUGHT --work FOLDER --cache_dir FOLDER --seconds 140

The runs are G2PO's of `pretrained.py --stages smollm2-methods`, one seed: the usual pair, and a pair with vLLM's
`VLLM_BATCH_INVARIANT=1` and deterministic kernels in the trainer. A fifth process, at a learning rate of 0, plays the
panels of the start, 96 games twice at both temperatures. OUTPUT/results.json has each run's digests (`digests.py`),
and for each pair the last iteration up to which all of a kind are equal, OUTPUT/table.md the same as a table.
`--arms usual invariant start` chooses. `--shrink --generate` with the tiny model as the start needs no GPU. On a GPU,
one iteration of the invariant pair has run, before cuBLAS's variables were set here; the usual pair has never run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.gpu.jobs import Job, Report, commit, failed, lay_paths, machine, port_of, read_lines, run, write_page
from benchmarks.gpu.pretrained import METHODS, arguments, command_of, methods, stages

ITERATIONS = 6
# On Hopper vLLM asks cuBLAS for these workspaces, but after the trainer's model has been on the GPU.
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
PAIRS: dict[str, dict[str, str]] = {"usual": {}, "invariant": {"VLLM_BATCH_INVARIANT": "1", **CUBLAS}}
KINDS = ("prompts", "completions", "sampled log-probabilities", "log-probabilities", "weights", "loss", "grad_norm")


def equal_until(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return by kind the number of iterations, from the first on, in which both runs have the same."""
    found = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for a, b in zip(one, other):
            if kind not in a or a[kind] != b.get(kind):
                break
            found[kind] += 1
    return found


def seconds_of(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each iteration, without the first, in which kernels are compiled."""
    steps = [line for line in lines if "success_rate" in line]
    each = [sum(line.get(phase) or 0.0 for phase in ("rollout", "logps", "update")) for line in steps]
    return [round(seconds, 3) for seconds in each[1:]]


def main() -> None:
    args = arguments(["--stages", METHODS, *sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for folder in (args.output, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    cores = max(1, (os.cpu_count() or 1) // 5)
    environment = {"OMP_NUM_THREADS": str(cores), **lay_paths(args.work, args.wheels)}
    content: dict[str, Any] = {
        "command": common.command(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "machine": machine(environment),
        "shrink": args.shrink,
        "seed": methods()[0].seed,
        "pairs": PAIRS,
        "parts": {},
    }
    report, jobs = Report(args.output / "results.json", content), []
    one = stages.smoke(methods()[0]) if args.shrink else methods()[0]
    chosen = args.arms or [*PAIRS, "start"]
    pairs = {pair: variables for pair, variables in PAIRS.items() if pair in chosen}
    for pair, variables in pairs.items():
        for letter in "ab":
            name = f"{pair}-{letter}"
            command = command_of(one, args, max(1, cores - 1), name)
            command += [
                *args.extra,
                "--eval_before",
                "false",
                "--eval_strategy",
                "no",
                "--max_steps",
                str(args.max_steps or (2 if args.shrink else ITERATIONS)),
            ]
            command += ["--num_eval_games", "8", "--num_generations_eval", "1"]  # nobody reads it
            command += ["--digests", str(args.output / f"{name}.digests")]
            command += ["--deterministic"] if variables else []
            ports = port_of(len(jobs), args.port)
            jobs.append(Job(name, command, args.output, args.seconds, {**environment, **ports, **variables}))
    command = command_of(one, args, max(1, cores - 1), "start")
    command += [
        *args.extra,
        "--learning_rate",
        "0",
        "--max_steps",
        "1",
        "--eval_strategy",
        "no",
        "--eval_before",
        "false",
    ]
    if "start" in chosen:
        jobs.append(Job("start", command, args.output, args.seconds, {**environment, **port_of(len(jobs), args.port)}))
    for job in jobs:
        (args.output / f"{job.name}.digests").unlink(missing_ok=True)
    run(jobs, report)
    digests = {job.name: read_lines(args.output / f"{job.name}.digests") for job in jobs if job.name != "start"}
    content["digests"] = digests
    content["equal until"] = {
        pair: {"of": min(len(digests[f"{pair}-{letter}"]) for letter in "ab")}
        | equal_until(digests[f"{pair}-a"], digests[f"{pair}-b"])
        for pair in pairs
    }
    content["seconds of iterations"] = {name: seconds_of(part["findings"]) for name, part in content["parts"].items()}
    report.write()
    write_page(report)
    if names := failed(content["parts"]):
        sys.exit(f"failed: {', '.join(names)}; see the logs in {args.output}")


if __name__ == "__main__":
    main()
