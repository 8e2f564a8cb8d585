"""Seconds and episodes of a run, from the log of its iterations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .plan import Episodes

_PHASES = ("time/rollout", "time/advantage", "time/critic", "time/batch", "time/logps", "time/update", "time/weights")


@dataclass(frozen=True)
class MeasuredRun:
    """What iterations took.

    Args:
        iterations: that were counted.
        seconds: median of each phase, those of `docs/metrics.md`.
        iteration: median seconds of an iteration.
        evaluation: seconds of the last evaluation at all temperatures; 0 without one.
        rest: seconds of the command besides iterations and evaluations: imports, tasks, saving. 0 if not measured.
        peak_memory: bytes of the largest process; 0 if not measured.
        episodes: what episodes were like.
    """

    iterations: int
    seconds: Mapping[str, float]
    iteration: float
    evaluation: float
    rest: float
    peak_memory: float
    episodes: Episodes


def read_measured(folder: Path, wall: float = 0.0, peak_memory: float = 0.0) -> MeasuredRun:
    """Return what a run's iterations took; the first one, which warms up, is left out if there are others.

    `wall`: seconds of the whole command. Raises `ValueError` if the folder has no log of an iteration.
    """
    history = _log(folder)
    entries = [entry for entry in history if "time/rollout" in entry]
    if not entries:
        raise ValueError(f"{folder} has no iteration in its trainer_state.json: pass the folder of a training run")
    counted = entries[1:] or entries
    totals = [_seconds(entry) for entry in counted]
    names = [name for name in _PHASES if any(name in entry for entry in counted)]
    last = max((entry["step"] for entry in history if _is_evaluation(entry)), default=None)
    played = [sum(_runtimes(entry)) for entry in history if _is_evaluation(entry) and entry["step"] == last]
    evaluations = sum(sum(_runtimes(entry)) for entry in history if _is_evaluation(entry))
    rest = wall - sum(map(_seconds, entries)) - evaluations if wall else 0.0
    return MeasuredRun(
        len(counted),
        {name: median(entry.get(name, 0.0) for entry in counted) for name in names},
        median(totals),
        sum(played),
        max(0.0, rest),
        peak_memory,
        _episodes(counted, str(folder)),
    )


def _log(folder: Path) -> list[dict[str, Any]]:
    states = [*sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)]
    states += [folder / "trainer_state.json"]
    found = [path for path in states if path.is_file()]
    if not found:
        raise ValueError(f"{folder} has no trainer_state.json: pass the folder of a training run")
    try:
        return json.loads(found[-1].read_text(encoding="utf-8"))["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{found[-1]} cannot be read ({error!r}): pass the folder of another run") from error


def _seconds(entry: Mapping[str, float]) -> float:
    return sum(entry.get(name, 0.0) for name in _PHASES)


def _is_evaluation(entry: Mapping[str, float]) -> bool:
    return bool(_runtimes(entry))


def _runtimes(entry: Mapping[str, float]) -> list[float]:
    return [value for name, value in entry.items() if name.endswith("_runtime") and name != "train_runtime"]


def _episodes(entries: list[dict[str, float]], source: str) -> Episodes:
    steps = sum(entry["rollout/steps"] for entry in entries)
    number = sum(entry["rollout/episodes"] for entry in entries)
    prompts, completions = (
        sum(entry[f"rollout/{kind}_tokens"] for entry in entries) for kind in ("prompt", "completion")
    )
    forwarded = sum(entry.get("update/forwarded_tokens", 0.0) for entry in entries)
    turns = steps / number
    active = median(entry.get("rollout/active_fraction", 1.0) for entry in entries)
    return Episodes(
        turns,
        turns / max(active, 1e-9),
        prompts / steps,
        completions / steps,
        forwarded / (prompts + completions),
        source,
    )
