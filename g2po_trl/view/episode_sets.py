"""Evaluations for the page: sets of episodes by task, from a training run or from a folder of `g2po evaluate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs.ownership import read_description
from ..trajectory import read_unfinished
from ..utils.json import read_json_lines
from ..utils.options import require
from .texts import Prompts, Texts, episode_data, step_data, task_data

_SETTINGS = (
    "agent engine environment panel trials max_turns history_length temperature top_p top_k max_completion_length seed"
).split()


@dataclass(frozen=True)
class EpisodeSet:
    """Episodes of one evaluation set, played by one policy.

    Args:
        key: name within its folder, with URL-safe characters.
        panel: the set's name.
        step: the optimizer step of a training run; `None` for `g2po evaluate`.
        success: success rate as recorded by the run; `None` if not recorded.
        files: pairs of seed and file of trajectories; evaluations of a training run have one file and no seed.
        folder: folder of the run or evaluation.
        prompts: decodes prompts.
    """

    key: str
    panel: str
    step: int | None
    success: float | None
    files: Sequence[tuple[int | None, Path]]
    folder: Path
    prompts: Prompts

    def about(self) -> dict[str, Any]:
        return {"key": self.key, "panel": self.panel, "step": self.step, "success": self.success}

    def data(self, prompts: bool = True) -> dict[str, Any]:
        """Return the episodes by task, in the set's order. `unfinished`: incomplete lines, which are skipped."""
        texts, kinds = Texts(self.folder), _task_types(self.folder)
        decode = self.prompts if prompts else None
        tasks: dict[str, dict[str, Any]] = {}
        order: dict[str, int] = {}
        unfinished = 0
        for seed, path in self.files:
            for trajectory in read_unfinished(path):
                if trajectory is None:
                    unfinished += 1
                    continue
                name, info = trajectory.task_id, trajectory.info
                order.setdefault(name, info.get("panel_index", len(order)))
                kind = ", ".join(filter(None, [trajectory.environment, kinds.get(name)])) or None
                known = task_data(trajectory, texts)
                task = tasks.setdefault(name, {**known, "kind": kind, "episodes": []})
                task["task"] = task["task"] or trajectory.task
                tokens = [info.get("prompt_tokens"), info.get("completion_tokens")]
                task["episodes"].append(
                    {
                        **episode_data(trajectory, texts),
                        "seed": seed,
                        "trial": info.get("trial", 0),
                        "last": info.get("last_trial", True),
                        "tokens": None if None in tokens else tokens,
                        "reflections": [texts.number(str(note)) for note in info.get("reflections", ())],
                        "steps": [step_data(step, texts, decode) for step in trajectory.steps],
                    }
                )
        ordered = sorted(tasks.values(), key=lambda task: order[task["id"]])
        return {**self.about(), "tasks": ordered, "texts": texts.all, "unfinished": unfinished}


def sets_of_run(folder: Path, evaluations: Sequence[dict[str, Any]], prompts: Prompts) -> list[EpisodeSet]:
    """Return the evaluations of a run, by set and step, from trajectories/PANEL-STEP.jsonl and evaluations.jsonl.

    The validations of a model that `g2po teach` trained form the set "exam".
    """
    rates = {(entry.get("name", "eval"), entry["step"]): entry.get("success_rate") for entry in evaluations}
    sets = []
    for path in [*folder.glob("trajectories/*.jsonl"), *folder.glob("exams/exam-*.jsonl")]:
        found = re.fullmatch(r"(.+)-(\d+)", path.stem)
        if found and found[1] not in ("train", "replaced"):
            panel, step = found[1], int(found[2])
            rate = rates.get((panel, step))
            sets.append(EpisodeSet(f"{panel}-{step}", panel, step, rate, [(None, path)], folder, prompts))
    return sorted(sets, key=lambda one: (one.panel, one.step))


class Evaluation:
    """An output folder of `g2po evaluate`. Raises `ValueError` if it has no trajectories."""

    numbers: Sequence[int] = ()  # an evaluation has no iterations

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        found = [
            (int(match[1]), path)
            for path in self.folder.glob("trajectories/*.jsonl")
            if (match := re.fullmatch(r".+-(\d+)", path.stem))
        ]
        remedy = "it holds no trajectories, start the evaluation again with the same command"
        require(bool(found), "folder", str(folder), remedy)
        self._files = sorted(found)
        self._settings = read_description(self.folder, "settings.json")

    def about(self) -> dict[str, Any]:
        """Return name and settings."""
        results = read_description(self.folder, "results.json")
        settings = {"model": results.get("model") or self._settings.get("model")}
        settings |= {name: self._settings.get(name) for name in _SETTINGS}
        settings["seeds"] = f"{len(self._files)}{'' if results else ' (unfinished)'}"
        return {"name": self.name, "settings": {k: v for k, v in settings.items() if v is not None}}

    def overview(self) -> dict[str, Any]:
        """Return no curves: an evaluation has no iterations."""
        return {**self.about(), "curves": [], "evaluations": []}

    def sets(self) -> list[EpisodeSet]:
        """Return the episodes of all seeds as one set."""
        panel = str(self._settings.get("panel", "panel"))
        return [EpisodeSet("all", panel, None, None, self._files, self.folder, Prompts(self.folder))]


def _task_types(folder: Path) -> dict[str, str]:
    """Return task id -> task type, from the rows in panels/ that have both."""
    kinds = {}
    for path in folder.glob("panels/*.jsonl"):
        for row in read_json_lines(path):
            if row.get("task_id") is not None and row.get("task_type") is not None:
                kinds[str(row["task_id"])] = str(row["task_type"])
    return kinds
