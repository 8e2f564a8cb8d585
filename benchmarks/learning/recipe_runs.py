"""Runs of recipes, each in a process of its own, that can be stopped at any time and continued."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from g2po_trl.utils.json import write_json


class Busy(Exception):
    """Another process is at this run."""


@dataclass
class RecipeRunner:
    """Runs recipes until told to stop."""

    stopping: threading.Event = field(default_factory=threading.Event, kw_only=True)
    processes: set[subprocess.Popen] = field(default_factory=set, kw_only=True)

    def run(
        self, folder: Path, command: Sequence[str], commit: str, resume: bool = True
    ) -> list[dict[str, Any]] | None:
        """Run or continue a recipe, on one thread, with its output folder.

        Args:
            command: the recipe and its flags.

        Returns:
            What each attempt cost; `None` if it was stopped before its end.

        Raises:
            Busy: when another process is at it.
            RuntimeError: when the recipe failed; names its log.
        """
        flags = ["--output_dir", str(folder), *(["--resume_from_checkpoint", "auto"] if resume else [])]
        with lock(folder / "lock") as held:
            return self.call(folder, [sys.executable, *command, *flags], commit, held)

    def call(
        self, folder: Path, words: Sequence[str], commit: str, held: int, name: str | None = None
    ) -> list[dict[str, Any]] | None:
        """Run a program for the run in a folder, on one thread, while its lock is held.

        Args:
            words: the program and its arguments.
            held: descriptor of the lock.
            name: of the program among those of this run: one that has ended well is not run again.

        Returns:
            What each attempt of all programs cost; `None` if it was stopped before its end.

        Raises:
            RuntimeError: when the program failed; names its log.
        """
        started = time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        path = folder / "attempts.json"
        attempts = json.loads(path.read_text()) if path.exists() else []
        if name and any(attempt.get("program") == name and attempt["exit"] == 0 for attempt in attempts):
            return attempts
        if attempts and attempts[-1]["exit"] is None:  # ended with its machine: known until its last words
            until = (folder / "log.txt").stat().st_mtime
            attempts[-1]["seconds"] = round(max(0.0, until - attempts[-1]["started"]), 1)
        attempts.append({"started": round(started), "commit": commit, "seconds": 0.0, "exit": None})
        attempts[-1] |= {"program": name} if name else {}
        write_json(path, attempts)  # known even if this process does not live to see its end
        with (folder / "log.txt").open("a") as log:
            # A session of its own: stopped together with its environments. It holds the lock as long as it lives.
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
                pass_fds=[held],
            )
        self.processes.add(process)
        if self.stopping.is_set():  # told to stop while it was started
            end(process)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = failed = os.waitstatus_to_exitcode(status)
        self.processes.discard(process)
        attempts[-1] |= {"exit": failed, "seconds": round(time.time() - started, 1)}
        attempts[-1]["load"] = round(os.getloadavg()[1], 1)
        attempts[-1]["cpu_seconds"] = round(used.ru_utime + used.ru_stime, 1)  # with its environments
        write_json(path, attempts)
        if self.stopping.is_set() and failed:
            return None
        if failed:
            last = "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{' '.join(words)}: exit code {failed}, see {folder}/log.txt\n{last}")
        return attempts

    def side_by_side(self, worker: Callable[[], Any], number: int) -> list[Any]:
        """What so many calls at once return; what one raises is raised when all are over."""
        with ThreadPoolExecutor(number) as pool:
            calls = [pool.submit(worker) for _ in range(number)]
            while not all(call.done() for call in calls):  # the main thread must be there to take signals
                time.sleep(0.2)
        found = [call.result() for call in calls]
        if self.stopping.is_set():
            say("Stopped. The same command goes on from the last iterations.")
        return found

    def stop_on_signals(self) -> None:
        """Ctrl-C, SIGTERM and a closed terminal stop the runs, too."""
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(kind) is not signal.SIG_IGN:  # as under nohup
                signal.signal(kind, self.stop)

    def stop(self, *_) -> None:
        """End what runs, start nothing more."""
        self.stopping.set()
        for process in list(self.processes):
            end(process)


def say(text: str) -> None:
    """A line of the program's output; whole, whatever other threads say."""
    print(f"{time.strftime('%H:%M:%S')} {text}\n", end="", flush=True)


def end(process: subprocess.Popen) -> None:
    """End a run with its environments. It has no state but its checkpoints, which are never half-written."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


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


def code(parts: Sequence[str]) -> tuple[str, str]:
    """What is run: the commit, marked if it was changed since, and a hash of the code that a run depends on.

    By the hash a program can start an interrupted run anew where the code has changed since: half a run of one method
    is none of either. The commit of every attempt is kept.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = git("diff", "HEAD", "--", *parts)
    trees = git("rev-parse", *(f"HEAD:{part}" for part in parts))
    return git("rev-parse", "HEAD") + "-changed" * bool(changed), trees + changed
