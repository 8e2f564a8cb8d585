"""Walkthroughs of games, computed by the bundled planner in separate processes.

`python -m g2po_envs.alfworld.planning` writes one JSON line per game: the commands that solve it, verified by the
engine, or null. A plain subprocess (not `multiprocessing`) never imports the caller's main module again, needs no `if
__name__ == "__main__"`, and keeps the planner's output away from the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue


def solve(game: dict) -> list[str] | None:
    """Return commands that solve the game, verified by playing them; `None` if it cannot be solved."""
    from g2po_envs.alfworld.engine import Game, Session

    loaded = Game(game, planning=True)
    commands = loaded.plan()
    session = Session(loaded)
    for command in commands:
        session.step(command)
    return commands if commands and session.won else None


class Planners:
    """A few planner processes: `solve` maps games to walkthroughs, in order, lazily."""

    def __init__(self, num_workers: int):
        self._free: SimpleQueue[subprocess.Popen] = SimpleQueue()
        self._workers = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for _ in range(num_workers):
            errors = tempfile.TemporaryFile()
            worker = subprocess.Popen(
                [sys.executable, "-m", "g2po_envs.alfworld.planning"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            self._workers.append((worker, errors))
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(num_workers)

    def solve(self, games: Iterable[dict]) -> Iterator[tuple[dict, list[str] | None]]:
        """Yield (game, walkthrough or `None`) in order, reading only a few games ahead."""
        games = iter(games)
        ahead = [(game, self._threads.submit(self._ask, game)) for game in islice(games, 2 * len(self._workers))]
        while ahead:
            game, answer = ahead.pop(0)
            yield game, answer.result()
            ahead += [(game, self._threads.submit(self._ask, game)) for game in islice(games, 1)]

    def _ask(self, game: dict) -> list[str] | None:
        worker = self._free.get()
        try:
            worker.stdin.write(json.dumps(game) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except OSError:
            answer = ""
        finally:
            self._free.put(worker)  # also a dead one: who waits for a worker must learn of it
        if not answer:
            raise RuntimeError(f"a planner process died with exit code {worker.wait()}:\n{self._errors(worker)}")
        return json.loads(answer)

    def _errors(self, worker: subprocess.Popen) -> str:
        file = next(errors for process, errors in self._workers if process is worker)
        file.seek(0)
        return file.read().decode(errors="replace")[-2000:]

    def __enter__(self) -> Planners:
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)  # first: else one starts on a worker that is gone
        for worker, _ in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True)
        for worker, errors in self._workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout, errors):
                with contextlib.suppress(OSError):  # what was not sent to a killed process
                    pipe.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the planner prints from C
    for line in sys.stdin:
        print(json.dumps(solve(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
