"""A preregistered comparison of methods, and what follows it: other methods, rates, WebShop, a pretrained model.

    python -m benchmarks.learning.comparison [--minutes 600] [--stages main treasure …]
    python -m benchmarks.learning.comparison --report

Stages are in `stages.py`. What was expected of them before the first run is in
benchmarks/results/comparison/log.md. Each run is `g2po train` as a user runs it, with the seed and the arm's flags, on
one thread; then held-out games are played by `g2po evaluate`.

A complete run is one line of RESULTS/runs.jsonl.gz, and is not run again. What is interrupted, also by kill -9, goes
on from its last iteration when the same command is given again. To play several runs at once, start the command
several times: a run that another process is at is left to it. At the end, and with `--report`: table.md and figures of
what is there. Run it in a worktree at a tag: a run in progress starts again where the code or the recipe has changed.

The stages with SmolLM2 (*treasure*, *prompted*, *pretrained*, *smollm2…*) teach it first, unless `--taught` names it
as taught.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import figures
from benchmarks.common import RESULTS, ROOT, machine, read_lines
from benchmarks.learning.stages import ALL, ARMS, GAME, PILOT, REFERENCE, SEEDS, START, TAUGHT, Job, jobs_of, smoke
from benchmarks.learning.statistics import collapsed, dunnett, first_at, first_half, paired_interval, smallest_effect
from g2po_trl import read_jsonl
from g2po_trl.environments.tasks import read_tasks
from g2po_trl.runs.metrics import summarize
from g2po_trl.utils.json import write_json

PARTS = ("g2po_trl", "envs", "recipes", "benchmarks/credit", "benchmarks/learning/treasure.yaml")
VERSIONS = ("torch", "transformers", "trl", "accelerate", "numpy", "scipy", "alfworld", "textworld")
VLLM = ROOT / ".venv-vllm/bin/python"
# For vLLM's CPU build; several runs at once must not be bound to the same core.
OF_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
KEPT = ("success_rate", "score", "turns", "turns_to_success", "valid_action_ratio", "admissible_action_ratio")
KEPT += ("error_rate", "success_rate_by_type")

Run = Mapping[str, Any]
Arms = dict[str, dict[int, Run]]  # arm -> seed -> run
# Runs of the main stage that belong to the tables of others: stage -> arm -> its name there.
BORROWED = {
    "rates": {arm: arm for arm in ("g2po", "gigpo", "grpo")},
    "methods": {arm: arm for arm in (START, REFERENCE, "gigpo", "grpo")},
    "weights": {"grpo": "w 0", REFERENCE: "w 1"},  # GRPO and G2PO, bit for bit
}
ABOUT = f"""# Comparison of methods

Success in percent, mean ± standard deviation over seeds. *First half*: mean success of the training episodes in the
first half of the iterations. *Training*: in all of them. *Held-out*: success after training on tasks that are not
trained on, at the temperature named; at 1.0 each is played twice. *Minus {REFERENCE}*: mean of the differences paired
by seed, in points, with Student's 95 % interval, not corrected for the number of arms. *Collapsed*: runs with less
than 95 % valid completions or a KL above 0.5 in any iteration."""


class Busy(Exception):
    """Another process is at this run."""


@contextmanager
def lock(path: Path) -> Iterator[int]:
    """Hold a file that no other process holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy from None
        yield file.fileno()


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def code() -> tuple[str, str]:
    """Return the commit, marked if it was changed since, and what identifies the code that a run depends on."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = git("diff", "HEAD", "--", *PARTS)
    return git("rev-parse", "HEAD") + "-changed" * bool(changed), git(
        "rev-parse", *(f"HEAD:{p}" for p in PARTS)
    ) + changed


def fingerprint(job: Job, trees: str) -> str:
    """Return a hash of all that makes a run another one: half a run of one is none of either."""
    config = (ROOT / job.words[job.words.index("--config") + 1]).read_text() if job.words else ""
    about = [
        job.words,
        job.evaluate,
        job.games,
        job.panels,
        yaml.safe_load(config),
        list(map(version, VERSIONS)),
        trees,
    ]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]


@dataclass
class Runner:
    """Plays jobs.

    Args:
        results: folder of runs.jsonl.gz.
        work: folder of runs.
        taught: SmolLM2 as taught; None: WORK/taught, made by the first job that needs it.
        vllm: play the episodes of pretrained models with vLLM.
    """

    results: Path
    work: Path
    taught: Path | None = None
    vllm: bool = False

    def play(self, job: Job) -> dict[str, Any]:
        """Play or resume a job; keep and return its result.

        Raises:
            Busy: when another process is at it.
            RuntimeError: when a program failed; names its log.
        """
        commit, trees = code()
        if job.pretrained and self.taught is None:
            with lock(self.work / "taught/lock") as held:
                words = ["teach", "alfworld", "--output_dir", self.work / "taught", "--bf16", "false"]
                self.call(self.work / "taught", words, held, "teach")
        if job.words and GAME in job.words[0]:
            (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
            (self.work / "treasure.py").write_text(script)
        folder = self.work / job.stage / f"{job.name}-{fingerprint(job, trees)}"
        panels: list[dict[str, Any]] = []
        with lock(folder / "lock") as held:
            for until in job.until or (None,):
                if job.words:
                    self.train(job, folder, until, held)
                panels.append({"until": until, **self.panels(job, folder, until, held)})
                if self.is_over(job, folder, panels[-1]):
                    break
            attempts = json.loads((folder / "attempts.json").read_text())
            kept = {"stage": job.stage, "arm": job.arm, "seed": job.seed, "command": job.words or job.evaluate}
            kept |= {"commit": commit, "versions": {package: version(package) for package in VERSIONS}}
            kept |= {"machine": machine(), "held_out": panels}
            for name in ("seconds", "cpu_seconds"):
                kept[name] = round(sum(attempt[name] for attempt in attempts), 1)
            kept |= figures.record_of(folder) if job.words else {}
            append(self.results / "runs.jsonl.gz", kept)
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)  # up to gigabytes, and the run is over
        return kept

    def train(self, job: Job, folder: Path, until: int | None, held: int) -> None:
        """Run `g2po train` to its end, or to a number of optimizer steps."""
        words = ["train", *self.placed(job.words), *([] if until is None else ["--max_steps", str(until)])]
        words += ["--use_vllm", "true"] if self.vllm and job.pretrained else []
        words += ["--seed", str(job.seed), "--output_dir", folder, "--resume_from_checkpoint", "auto"]
        self.call(folder, words, held, f"train {until or ''}".strip(), job.pretrained)

    def panels(self, job: Job, folder: Path, until: int | None, held: int) -> dict[str, Any]:
        """Play the panels and return them by temperature."""
        played = {}
        for temperature, times in job.panels:
            output = folder / "panels" / f"{until or 'end'}-{temperature:g}"
            words, options = self.placed(job.evaluate), {"number": job.games}
            if not job.evaluate:
                words = ["--model", folder]
                options = json.loads((folder / "run.json").read_text())["evaluation"]["panel_options"] | options
            words += ["--panel-options", json.dumps(options), "--temperature", f"{temperature:g}"]
            words += ["--seeds", str(times), "--output", output, "--num-environment-workers", "1"]
            words += ["--batch-size", "48" if job.pretrained else "192"]
            words += ["--engine", "vllm"] if self.vllm and job.pretrained else []
            self.call(folder, ["evaluate", *words], held, f"panel {output.name}", job.pretrained)
            played[f"{temperature:g}"] = panel_of(output)
        return played

    def call(self, folder: Path, words: Sequence[Any], held: int, name: str, pretrained: bool = False) -> None:
        """Run `g2po WORDS` on one thread; a program of this run's that has ended well is not run again."""
        path = folder / "attempts.json"
        attempts = json.loads(path.read_text()) if path.exists() else []
        if any(attempt["program"] == name and attempt["exit"] == 0 for attempt in attempts):
            return
        python = str(VLLM) if self.vllm and pretrained else sys.executable
        started = time.time()
        with (folder / "log.txt").open("a") as log:
            # A session of its own: stopped together with its environments. It holds the lock as long as it lives.
            process = subprocess.Popen(
                [python, "-m", "g2po_trl", *map(str, words)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
                cwd=ROOT,
                start_new_session=True,
                pass_fds=[held],
            )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:  # Ctrl-C: it has no state but its checkpoints, which are never half-written
            os.killpg(process.pid, signal.SIGKILL)
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        took = {"seconds": round(time.time() - started, 1), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}
        attempts.append({"program": name, "exit": process.returncode, **took})
        write_json(path, attempts)
        if process.returncode:
            last = "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{name}: exit code {process.returncode}, see {folder}/log.txt\n{last}")

    def placed(self, words: Sequence[str]) -> list[str]:
        """Return words with this machine's paths."""
        places = {TAUGHT: str(self.taught or self.work / "taught"), GAME: str(self.work / "treasure.py")}
        return [places.get(name, name) + colon + rest for name, colon, rest in (word.partition(":") for word in words)]

    def is_over(self, job: Job, folder: Path, panel: dict[str, Any]) -> bool:
        """Return whether a run has come to what ends it before its last iteration."""
        if job.reach is not None:
            return first_at(figures.record_of(folder)["training"]["success"], job.reach) is not None
        before = load(self.results).get(job.stage, {}).get(START)
        if job.gain is None or not before:
            return False
        (start,) = before.values()
        return np.mean(panel["1"]["success_rate"]) >= held_out(start) + job.gain / 100


def append(path: Path, run: Mapping[str, Any]) -> None:
    """Add a line to a compressed file; lines of several processes do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(gzip.compress((json.dumps(run, ensure_ascii=False) + "\n").encode(), mtime=0))


def panel_of(output: Path) -> dict[str, Any]:
    """Return an evaluation: rates of each play, and who won which game: `1` won, `0` lost, `e` error, by task."""
    rows = sorted(read_tasks(output / "panels" / "panel.jsonl"), key=lambda row: row["task_id"])
    kinds = [row.get("task_type") for row in rows]
    plays, won = [], []
    for path in sorted((output / "trajectories").glob("*.jsonl"), key=lambda p: int(p.stem.rsplit("-", 1)[1])):
        # Of Reflexion's trials of a task the last one counts.
        played = sorted((t for t in read_jsonl(path) if t.info.get("last_trial", True)), key=lambda t: t.task_id)
        plays.append(summarize(played, kinds))
        won.append("".join("1" if t.success else "0" if t.counted else "e" for t in played))
    games = hashlib.sha256("\n".join(row["task_id"] for row in rows).encode()).hexdigest()[:12]
    rates = {name: [figures.rounded(play[name]) for play in plays] for name in KEPT if name in plays[0]}
    return {"games": games, "won": won, **rates}


def complete(results: Path) -> list[Run]:
    """Return the complete runs."""
    path = results / "runs.jsonl.gz"
    return read_lines(path) if path.exists() else []


def load(results: Path) -> dict[str, Arms]:
    """Return the complete runs by stage, arm and seed, with those of the main stage that other tables need."""
    found: dict[str, Arms] = {}
    for run in complete(results):
        found.setdefault(run["stage"], {}).setdefault(run["arm"], {})[run["seed"]] = run
    for stage, names in BORROWED.items():
        for arm, name in names.items() if stage in found else ():
            runs = found.get("main", {}).get(arm, {})
            found[stage][name] = {seed: run for seed, run in runs.items() if arm == START or seed in SEEDS[stage]}
    order = {arm: place for place, arm in enumerate([START, *ARMS])}
    return {
        stage: dict(sorted(arms.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
        for stage, arms in found.items()
    }


def held_out(run: Run, temperature: str = "1", measure: str = "success_rate") -> float | None:
    """Return a measure on held-out games after training, mean over plays; `None`: not played."""
    played = run["held_out"][-1].get(temperature, {}).get(measure)
    return None if played is None else float(np.mean(played))


def learned(run: Run) -> bool:
    """Return whether a run has a learning curve."""
    return "training" in run and run["arm"] != START


REACHED = "iterations to 80 %"
MEASURES: dict[str, Callable[[Run], float | None]] = {
    "first half": lambda run: first_half(run["training"]["success"]) if learned(run) else None,
    "training": lambda run: float(np.mean(run["training"]["success"])) if learned(run) else None,
    "held-out 1.0": held_out,
    "held-out 0.4": lambda run: held_out(run, "0.4"),
    "held-out score 1.0": lambda run: held_out(run, measure="score"),
    REACHED: lambda run: first_at(run["training"]["success"]) if run["stage"] == "treasure" else None,
}


def secondary(run: Run) -> float:
    """Return the mean of training and held-out success at temperature 1."""
    return (MEASURES["training"](run) + held_out(run)) / 2


def table(arms: Arms, reference: str) -> str:
    """Return the table of a stage in Markdown: each measure that a run has, less the reference's."""
    titles, columns = ["arm", "seeds"], [list(arms), [str(len(seeds)) for seeds in arms.values()]]
    for name, measure in MEASURES.items():
        values = {
            arm: {seed: value for seed, run in sorted(seeds.items()) if (value := measure(run)) is not None}
            for arm, seeds in arms.items()
        }
        if not any(values.values()):
            continue
        titles.append(name)
        if name == REACHED:
            columns.append([", ".join(map(str, of.values())) for of in values.values()])
            continue
        columns.append([percent(of.values()) for of in values.values()])
        if values.get(reference):
            titles.append(f"minus {reference}")
            compared = {arm: of for arm, of in values.items() if arm not in (START, reference)}
            columns.append([against(compared.get(arm, {}), values[reference]) for arm in arms])
    titles.append("collapsed")
    columns.append([str(sum(collapsed(run.get("training", {})) for run in seeds.values())) for seeds in arms.values()])
    return "\n".join(map(row, [titles, ["---"] * len(titles), *zip(*columns)]))


def row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def percent(values: Sequence[float]) -> str:
    """Return mean ± sample standard deviation, in percent; fewer than three values, or equal ones, have none."""
    values = list(values)
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 2 and len(set(values)) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}" if values else "–"


def points(mean: float, interval: tuple[float, float] | None) -> str:
    """Return a difference in points with its interval."""
    return f"{100 * mean:+.1f}" + (f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]" if interval else "")


def against(values: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Return a cell: an arm less the reference, paired by seed."""
    differences = [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
    return points(float(np.mean(differences)), paired_interval(differences)) if differences else ""


def tests(arms: Arms) -> list[str]:
    """Return the preregistered tests in Markdown: both measures, with and without collapsed runs."""
    parts = []
    for name, measure in (("first half", MEASURES["first half"]), ("training and held-out", secondary)):
        for which in ("all runs", "without collapsed runs"):
            numbers = {
                (arm, seed): measure(run)
                for arm in ARMS
                for seed, run in arms[arm].items()
                if which == "all runs" or not collapsed(run["training"])
            }
            found = dunnett(numbers, REFERENCE)
            about = f"**{name}, {which}**: noise of a run {100 * found.noise:.1f} points, {found.freedom} degrees of "
            about += "freedom"
            if which == "all runs":
                effect = smallest_effect(found.noise, len(SEEDS["main"]), len(ARMS) - 1)
                about += f"; a true difference of {100 * effect:.1f} points is found with probability 0.8"
            lines = [
                row([f"arm minus {REFERENCE}", "points, simultaneous 95 % interval", "p (Dunnett)"]),
                "|---|---|---|",
            ]
            lines += [
                row([arm, points(of.mean, of.interval), f"{of.p:.3f}" if of.p >= 0.001 else "< 0.001"])
                for arm, of in found.differences.items()
            ]
            parts += [f"{about}.", "\n".join(lines)]
    return parts


def pilot_winner(results: Path) -> str | None:
    """Return how the pilot's better arm trains its weights, by held-out success at temperature 1; `None`: not over."""
    arms = load(results).get("smollm2-pilot", {})
    if not set(PILOT) <= set(arms):
        return None
    return max(PILOT, key=lambda arm: np.mean([held_out(run) for run in arms[arm].values()]))


def report(results: Path) -> str:
    """Write table.md and the figures of what is there; return the table."""
    found = load(results)
    parts = [ABOUT]
    for stage in filter(found.get, ALL):
        arms = found[stage]
        parts += [f"## {stage}", table(arms, "w 1" if stage == "weights" else REFERENCE)]
        if stage == "main":  # the stopping rule: nothing is tested before all runs are there
            missing = sum(len(SEEDS["main"]) - len(arms.get(arm, {})) for arm in ARMS)
            parts += [f"{missing} runs are missing: no test before they are complete."] if missing else tests(arms)
        curves = {
            arm: [run["training"]["success"] for run in seeds.values() if learned(run)] for arm, seeds in arms.items()
        }
        if curves := {arm: of for arm, of in curves.items() if of}:
            label = "success of training episodes, mean of 5 iterations (%)"
            figures.save(figures.learning_curves(curves, ylabel=label, bold=REFERENCE), results, f"curves-{stage}")
    settings = {
        name: {arm: list(found[stage][arm].values()) for arm in (REFERENCE, "gigpo", "grpo") if arm in found[stage]}
        for name, stage in (("ALFWorld", "main"), ("WebShop", "webshop"))
        if REFERENCE in found.get(stage, {})
    }
    if settings:
        figures.save(figures.paper(settings), results, "paper")
    text = "\n\n".join(parts) + "\n"
    (results / "table.md").write_text(text)
    return text


def run_all(args: argparse.Namespace) -> int:
    """Play what is missing; return the number of arms that failed."""
    runner, begun = Runner(args.results, args.work, args.taught, args.vllm), time.time()
    failed: dict[tuple[str, str], str] = {}
    while True:
        done = {(run["stage"], run["arm"], run["seed"]) for run in complete(args.results)}
        jobs = jobs_of(args.stages, pilot_winner(args.results))  # the pilot may be over by now
        left = [job for job in jobs if job.key not in done | args.busy and (job.stage, job.arm) not in failed]
        if not left or (args.minutes and time.time() - begun > 60 * args.minutes):
            return len(failed)
        job = smoke(left[0]) if args.smoke else left[0]
        say(f"{job.stage}, {job.arm}, seed {job.seed}")
        try:
            say(f"complete, {runner.play(job)['seconds']:.0f} s")
        except Busy:
            args.busy.add(job.key)
            say("another process is at it")
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            failed[job.stage, job.arm] = str(error)  # its other seeds would fail as well
            say(f"FAILED: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "comparison", help="folder of runs.jsonl.gz")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/g2po_trl/comparison"), help="folders of runs")
    parser.add_argument("--stages", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--taught", type=Path, help="SmolLM2 as `g2po teach alfworld` made it")
    parser.add_argument("--vllm", action="store_true", help=f"rollouts of SmolLM2 by vLLM, in {VLLM.parts[-3]}")
    parser.add_argument("--report", action="store_true", help="play nothing: write the report of what is there")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)  # the smallest runs, to test this
    args = parser.parse_args()
    args.results, args.work = args.results.expanduser().absolute(), args.work.expanduser().absolute()
    args.taught, args.busy = args.taught and args.taught.expanduser().absolute(), set()
    if args.vllm:
        os.environ.update({name: os.environ.get(name, value) for name, value in OF_VLLM.items()})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run in progress, too
    args.work.mkdir(parents=True, exist_ok=True)
    failed = 0 if args.report else run_all(args)
    print(report(args.results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
