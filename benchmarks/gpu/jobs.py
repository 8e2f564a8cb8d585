"""Processes on a GPU, beside each other or in turns: their limits, findings and logs, and the results file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu.table import table
from g2po_trl.utils.json import write_json

ROOT = common.ROOT
LAST_LINES = 30

FACTS = """
import importlib.metadata as m, json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda}
for name in ("transformers", "accelerate", "peft", "trl", "datasets", "triton", "flash_attn", "kernels", "vllm",
             "alfworld", "textworld"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: found[name] = None
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
gpus = [{"name": p.name, "gb": round(p.total_memory / 1e9, 1), "capability": f"{p.major}.{p.minor}"} for p in gpus]
print(json.dumps({"versions": found, "gpus": gpus}))
"""


@dataclass
class Job:
    """A process, the file it adds lines of JSON to, and its log."""

    name: str
    command: list[str]
    output: Path
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def findings(self) -> Path:
        return self.output / f".{self.name}.jsonl"

    @property
    def log(self) -> Path:
        return self.output / f"{self.name}.log"

    def start(self) -> None:
        self.findings.unlink(missing_ok=True)
        told = common.without_folders(" ".join(["python", *self.command[1:]]))
        self.result = {"command": told, "limit": round(self.seconds, 1)}
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **self.environment, "GPU_FINDINGS": str(self.findings)},
                start_new_session=True,  # ended together with its environments
            )

    def look(self) -> bool:
        """Take up what it has found and end it in time; true when it is over."""
        if "exit" in self.result:
            return True
        code, took = self.process.poll(), time.monotonic() - self.began
        if code is None and took > self.seconds:
            kill(self.process)
            code = self.process.wait()
            self.result["timed_out"] = True
        self.result |= {"seconds": round(took, 1), "findings": read_lines(self.findings)}
        if code is None:
            return False
        kill(self.process)  # what it has started and left
        self.result["exit"] = code
        if code:
            lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            self.result["last_lines"] = [common.without_folders(line) for line in lines]
        self.findings.unlink(missing_ok=True)
        return True


def kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a part has written so far; a line that is being written waits."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Report:
    """results.json, as far as it is."""

    path: Path
    content: dict[str, Any]

    def write(self) -> None:
        write_json(self.path, self.content, indent=1)


def write_page(report: Report) -> None:
    """Write table.md beside results.json, and print it."""
    text = table(report.content)
    report.path.with_name("table.md").write_text(text)
    print(f"\n{text}\n{report.path}", flush=True)


def run(jobs: Sequence[Job], report: Report, wait: float = 0.5) -> None:
    """Run the jobs beside each other, until each has ended or its time is up."""
    for job in jobs:
        print(f"{time.strftime('%H:%M:%S')} {job.name}, at most {job.seconds:.0f} s", flush=True)
        job.start()
        report.content["parts"][job.name] = job.result
    running, seen = list(jobs), None
    try:
        while running:
            running = [job for job in running if not job.look()]
            now = [(len(job.result["findings"]), job.result.get("exit")) for job in jobs]
            if now != seen:
                report.write()
            seen = now
            time.sleep(wait)
    finally:
        for job in running:
            kill(job.process)
        report.write()
    for job in jobs:
        ended = "out of time" if job.result.get("timed_out") else f"exit code {job.result['exit']}"
        print(f"{time.strftime('%H:%M:%S')} {job.name}: {ended} after {job.result['seconds']:.0f} s", flush=True)


def failed(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the parts that crashed or in which a test failed; running out of time is no failure."""
    return [
        name
        for name, part in parts.items()
        if (part["exit"] and not part.get("timed_out"))
        or any(found.get("outcome") == "failed" for found in part["findings"])
    ]


def lay_paths(work: Path) -> dict[str, str]:
    """Environment variables under which this checkout can be imported."""
    site = work / "site"
    site.mkdir(parents=True, exist_ok=True)
    for name, folder in (("g2po_envs", "envs"), ("g2po_recipes", "recipes")):
        if not (site / name).exists():
            (site / name).symlink_to(ROOT / folder)
    paths = [ROOT, site, ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}


def machine(environment: Mapping[str, str]) -> dict[str, Any]:
    asked = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    facts = common.machine()
    found = asked.stdout.strip().splitlines()
    return facts | (json.loads(found[-1]) if asked.returncode == 0 else {"error": asked.stderr.splitlines()[-5:]})


def commit() -> str | None:
    """Return the commit, or what GPU_COMMIT says of a copy without a history."""
    if told := os.environ.get("GPU_COMMIT"):
        return told

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    try:
        return (git("rev-parse", "HEAD") + "-changed" * bool(git("status", "--porcelain"))) or None
    except OSError:
        return None
