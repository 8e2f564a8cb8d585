"""Read the rollouts and the log of a run's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..trajectory import Trajectory, read_unfinished
from ..utils.json import read_json_lines
from ..utils.options import require


@dataclass(frozen=True)
class Iteration:
    """One rollout of a run: its number, from 1, its groups, and how many incomplete lines were skipped."""

    number: int
    groups: list[list[Trajectory]]
    unfinished: int = 0


def trajectory_files(run: str | Path, name: str = "train") -> dict[int, list[Path]]:
    """Return the files with the trajectories that a run kept of each iteration, one per rank, by its number."""
    files: dict[int, list[Path]] = {}
    for path in sorted(Path(run, "trajectories").glob("*.jsonl")):
        if found := re.fullmatch(rf"{name}-(\d+)(-rank\d+)?", path.stem):  # not the panel train-hard
            files.setdefault(int(found[1]), []).append(path)
    return dict(sorted(files.items()))


def load_iterations(run: str | Path) -> list[Iteration]:
    """Read a run's training trajectories, of all ranks. Raises `G2POError` without any."""
    numbers = list(trajectory_files(run))
    remedy = "it holds no trajectories of training; pass the output_dir of a run with them (`g2po view` shows others)"
    require(bool(numbers), "run", str(run), remedy)
    return [load_iteration(run, number) for number in numbers]


def load_iteration(run: str | Path, number: int) -> Iteration:
    """Read one iteration. Raises `KeyError` if the run does not have it."""
    read = [trajectory for path in trajectory_files(run)[number] for trajectory in read_unfinished(path)]
    groups: dict[Any, list[Trajectory]] = {}  # by task in files that do not number groups
    for one in filter(None, read):
        groups.setdefault(one.task_id if one.group is None else one.group, []).append(one)
    return Iteration(number, list(groups.values()), read.count(None))


def load_replaced(run: str | Path) -> list[Trajectory]:
    """Return the trajectories of all groups that dynamic sampling replaced; empty if there are none."""
    files = trajectory_files(run, "replaced").values()
    return [one for paths in files for path in paths for one in read_unfinished(path) if one is not None]


def load_evaluations(run: str | Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's evaluations.jsonl; none without the file."""
    path = Path(run, "evaluations.jsonl")
    return read_json_lines(path) if path.is_file() else []


def load_log(run: str | Path) -> list[dict[str, Any]]:
    """Return the logged metrics of each iteration so far; none without a log.jsonl.

    The time of an update may be logged after its rollout, with the next one.
    """
    path, iterations = Path(run, "log.jsonl"), []
    for line in read_json_lines(path) if path.is_file() else []:
        if iterations and "time/update" in line and "time/update" not in iterations[-1]:
            iterations[-1]["time/update"] = line.pop("time/update")
        iterations += [line] if "episode/success_rate" in line else []
    return iterations
