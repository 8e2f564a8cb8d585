"""Read the rollouts and the log of a run's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..credit.graph import StateGraph
from ..trajectory import Trajectory, read_unfinished
from ..utils.iteration_log import iterations_of
from ..utils.json import read_json_lines
from ..utils.options import require


@dataclass(frozen=True)
class Iteration:
    """One rollout of a run.

    Args:
        number: number of the iteration, from 1.
        groups: for each group, its trajectories.
        unfinished: number of incomplete lines in its files, which are skipped.
    """

    number: int
    groups: list[list[Trajectory]]
    unfinished: int = 0

    def graph(self, gamma: float = 0.95) -> StateGraph:
        """Return its state graph."""
        return StateGraph.from_groups(self.groups, gamma)


def load_iterations(run: str | Path) -> list[Iteration]:
    """Read a run's training trajectories, of all ranks. Raises `G2POError` without any."""
    files = _files(run, "train")
    if not files:
        others = any(Path(run, "trajectories").glob("*.jsonl")) or any(Path(run, "exams").glob("*.jsonl"))
        more = ". `g2po view` shows its evaluations" if others else ""
        require(False, "run", str(run), f"it holds no trajectories; pass the output_dir of a run with them{more}")
    return [_read_iteration(number, paths) for number, paths in sorted(files.items())]


def load_iteration(run: str | Path, number: int) -> Iteration:
    """Read one iteration. Raises `KeyError` if the run does not have it."""
    files = _files(run, "train")
    if number not in files:
        raise KeyError(f"{str(run)!r} has no trajectories of iteration {number}; there are {sorted(files)}")
    return _read_iteration(number, files[number])


def load_replaced(run: str | Path) -> list[Trajectory]:
    """Return the trajectories of all groups that dynamic sampling replaced; empty if there are none."""
    read = [_read_iteration(number, paths) for number, paths in sorted(_files(run, "replaced").items())]
    return [trajectory for iteration in read for group in iteration.groups for trajectory in group]


def load_evaluations(run: str | Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's evaluations.jsonl; none without the file."""
    path = Path(run, "evaluations.jsonl")
    return read_json_lines(path) if path.is_file() else []


def load_exams(run: str | Path) -> list[dict[str, Any]]:
    """Return the exams of a model that `g2po teach` wrote, as `load_evaluations`; empty if there are none."""
    path = Path(run, "exams", "results.json")
    return [{"name": "exam", **one} for one in json.loads(path.read_text())] if path.is_file() else []


def files_of_iteration(run: str | Path, number: int) -> list[Path]:
    """Return the files with the trajectories of an iteration, one per rank."""
    return _files(run, "train").get(number, [])


def iteration_numbers(run: str | Path) -> list[int]:
    """Return the numbers of the iterations whose trajectories a run kept."""
    return sorted(_files(run, "train"))


def load_log(run: str | Path) -> list[dict[str, Any]]:
    """Return the logged metrics of each iteration so far; none without a log.jsonl."""
    path = Path(run) / "log.jsonl"
    return iterations_of(read_json_lines(path)) if path.is_file() else []


def _files(run: str | Path, name: str) -> dict[int, list[Path]]:
    files: dict[int, list[Path]] = {}
    for path in sorted(Path(run, "trajectories").glob("*.jsonl")):
        if found := re.fullmatch(rf"{re.escape(name)}-(\d+)(-rank\d+)?", path.stem):  # not the panel train-hard
            files.setdefault(int(found[1]), []).append(path)
    return files


def _read_iteration(number: int, paths: Sequence[Path]) -> Iteration:
    groups: dict[Any, list[Trajectory]] = {}  # by task in files that do not number groups
    unfinished = 0
    for trajectory in (trajectory for path in paths for trajectory in read_unfinished(path)):
        if trajectory is None:
            unfinished += 1
            continue
        name = trajectory.task_id if trajectory.group is None else trajectory.group
        groups.setdefault(name, []).append(trajectory)
    return Iteration(number, list(groups.values()), unfinished)
