"""A preregistered comparison of methods, and what follows it: other methods, rates, WebShop, a pretrained model.

    python -m benchmarks.learning.comparison --jobs 1 [--minutes 600] [--stages main treasure …]
    python -m benchmarks.learning.comparison --report

Stages, in this order: *main*, eight arms on the default recipe with seeds 100 to 111, seed by seed; *treasure*, the
README's program with SmolLM2-135M; *rates*, the learning rate twice and half; *methods*, five other methods;
*webshop*; *weights*, the sweep of w; *prompted*, *smollm2-pilot*, *smollm2*, *smollm2-rooms*: SmolLM2 on ALFWorld.
What was expected of them before the first run is in benchmarks/results/comparison/log.md.
Each run is a recipe as a user runs it, with the seed
and the arm's flags, on one thread; then held-out games are played, twice at temperature 1 and once at 0.4.

A complete run is one small file, RESULTS/runs/STAGE/ARM-seedN.json, and is not run again. What is interrupted, also by
kill -9, goes on from its last iteration when the same command is given again; a run that another process is at is left
to it. At the end, and with `--report`: tables, figures and results.json of what is there (`comparison_report.py`). Run
it in a worktree at a tag: a run in progress starts again where the code or the recipe has changed.

The stages with SmolLM2 (*treasure*, *prompted*, *smollm2…*) teach it first, unless `--taught` names it as taught. They
compute in float32, and take several times as long as the others together.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

from benchmarks.learning.comparison_report import pilot_winner, report
from benchmarks.learning.comparison_runs import OF_VLLM, VLLM, Runner
from benchmarks.learning.comparison_stages import ALL, Job, jobs_of, smoke
from benchmarks.learning.recipe_runs import ROOT, Busy, say


def run_all(args: argparse.Namespace) -> int:
    """Play what is missing; the number of arms that failed."""
    runner, begun = Runner(args.results, args.work, args.taught, args.vllm), time.time()
    left: set[tuple[str, str, int]] = set()  # begun here, or busy elsewhere
    failed: dict[tuple[str, str], str] = {}
    choosing = threading.Lock()
    runner.stop_on_signals()

    def next_job() -> Job | None:
        """Return the first job that is neither complete, begun, nor of an arm that failed."""
        with choosing:
            if runner.stopping.is_set() or (args.minutes and time.time() - begun > 60 * args.minutes):
                return None
            for job in jobs_of(args.stages, pilot_winner(args.results)):  # the pilot may be over by now
                job = smoke(job) if args.smoke else job
                done = runner.file_of(job).is_file() or job.key in left or (job.stage, job.arm) in failed
                if not done:
                    left.add(job.key)
                    return job
            return None

    def worker() -> None:
        while job := next_job():
            say(f"{job.stage}, {job.arm}, seed {job.seed}")
            try:
                if runner.play(job):
                    took = json.loads(runner.file_of(job).read_text())["seconds"]
                    say(f"{job.stage}, {job.arm}, seed {job.seed}: complete, {took:.0f} s")
            except Busy:
                say(f"{job.stage}, {job.arm}, seed {job.seed}: another process is at it")
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                failed[job.stage, job.arm] = str(error)  # its other seeds would fail as well
                say(f"FAILED: {type(error).__name__}: {error}")

    runner.side_by_side(worker, args.jobs)
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/comparison", help="small files")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/g2po_trl/comparison"), help="folders of runs")
    parser.add_argument("--stages", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--taught", type=Path, help="SmolLM2 as `g2po teach alfworld` made it")
    parser.add_argument("--vllm", action="store_true", help=f"rollouts of SmolLM2 by vLLM, in {VLLM.parts[-3]}")
    parser.add_argument("--report", action="store_true", help="play nothing: write the report of what is there")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)  # the smallest runs, to test this
    args = parser.parse_args()
    args.results, args.work = args.results.expanduser().absolute(), args.work.expanduser().absolute()
    if args.taught is not None:
        args.taught = args.taught.expanduser().absolute()
        if not (args.taught / "model.safetensors").is_file():
            parser.error(f"--taught is {args.taught}, which holds no model.safetensors")
    if args.vllm and not VLLM.is_file():
        parser.error(f"{VLLM} is not there: run `make test-vllm`, or leave out --vllm")
    for name, value in OF_VLLM.items() if args.vllm else ():
        os.environ.setdefault(name, value)
    args.work.mkdir(parents=True, exist_ok=True)
    failed = 0 if args.report else run_all(args)
    print(report(args.results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
