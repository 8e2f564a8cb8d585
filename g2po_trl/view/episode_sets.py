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
        folder, prompts: folder of the run or evaluation, and its prompts.
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
        texts, kinds, decode = Texts(self.folder), _task_types(self.folder), self.prompts if prompts else None
        tasks: dict[str, dict[str, Any]] = {}
        order: dict[str, int] = {}
        read = [(seed, one) for seed, path in self.files for one in read_unfinished(path)]
        for seed, one in read:
            if one is None:
                continue
            info = one.info
            order.setdefault(one.task_id, info.get("panel_index", len(order)))
            kind = ", ".join(filter(None, [one.environment, kinds.get(one.task_id)])) or None
            task = tasks.setdefault(one.task_id, {**task_data(one, texts.number), "kind": kind, "episodes": []})
            task["task"] = task["task"] or one.task
            tokens = [info.get("prompt_tokens"), info.get("completion_tokens")]
            task["episodes"].append(
                {
                    **episode_data(one, texts),
                    "seed": seed,
                    "trial": info.get("trial", 0),
                    "last": info.get("last_trial", True),
                    "tokens": None if None in tokens else tokens,
                    "reflections": [texts.number(str(note)) for note in info.get("reflections", ())],
                    "steps": [step_data(step, texts, decode) for step in one.steps],
                }
            )
        found = {"texts": texts.all, "unfinished": sum(one is None for _, one in read)}
        return {**self.about(), "tasks": sorted(tasks.values(), key=lambda task: order[task["id"]]), **found}


def sets_of_run(folder: Path, evaluations: Sequence[dict[str, Any]], prompts: Prompts) -> list[EpisodeSet]:
    """Return the evaluations of a run, by set and step, from trajectories/PANEL-STEP.jsonl and evaluations.jsonl.

    The validations of a model that `g2po teach` trained form the set "validation".
    """
    rates = {(entry.get("name", "eval"), entry["step"]): entry.get("success_rate") for entry in evaluations}
    sets = []
    for path in [*folder.glob("trajectories/*.jsonl"), *folder.glob("validations/*.jsonl")]:
        found = re.fullmatch(r"(.+)-(\d+)", path.stem)
        if found and found[1] not in ("train", "replaced"):
            panel = found[1] if path.parent.name == "trajectories" else "validation"
            step = int(found[2])
            rate = rates.get((panel, step))
            sets.append(EpisodeSet(f"{panel}-{step}", panel, step, rate, [(None, path)], folder, prompts))
    return sorted(sets, key=lambda one: (one.panel, one.step))


class Evaluation:
    """An output folder of `g2po evaluate`. Raises `ValueError` if it has no trajectories."""

    numbers: Sequence[int] = ()  # an evaluation has no iterations

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        named = [(re.fullmatch(r".+-(\d+)", path.stem), path) for path in self.folder.glob("trajectories/*.jsonl")]
        self._files = sorted((int(found[1]), path) for found, path in named if found)
        remedy = "it holds no trajectories, start the evaluation again with the same command"
        require(bool(self._files), "folder", str(folder), remedy)
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
    rows = [row for path in folder.glob("panels/*.jsonl") for row in read_json_lines(path)]
    kinds = {str(row.get("task_id")): row.get("task_type") for row in rows}
    return {name: str(kind) for name, kind in kinds.items() if kind is not None}
