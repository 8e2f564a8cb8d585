"""A training run as plain data for the page: curves and settings first, then one iteration at a time."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ..runs.iterations import load_evaluations, load_exams, load_iteration, load_log, trajectory_files
from ..runs.metrics import METRICS
from ..runs.run_json import read_run
from ..utils.options import require
from .episode_sets import EpisodeSet, sets_of_run
from .groups import group_data, is_g2po
from .index import index_of
from .texts import Prompts, Texts

_SETTINGS = (
    "file state_key estimator_name gamma value_lambda step_advantage_weight invalid_action_penalty estimator_kwargs "
    "learning_rate beta num_generations max_turns temperature seed"
).split()


class Run:
    """A training run's folder, or one of `g2po credit`, read on demand.

    Args:
        folder: the `output_dir` of a training run, or the `--output` of `g2po credit`.
        live: accept a run that has begun and has no trajectories yet.

    Raises:
        ValueError: if the folder has no trajectories.
    """

    def __init__(self, folder: str | Path, live: bool = False):
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.numbers = list(trajectory_files(self.folder))
        described = read_run(self.folder) if (self.folder / "run.json").is_file() else {}
        model, traces = described.get("model"), described.get("traces")
        model = model.get("model_name_or_path") if isinstance(model, dict) else model  # a recipe's, by TRL's arguments
        self._prompts = Prompts(self.folder, model)
        self.settings = {**described.get("trainer", {}), **described.get("estimator", {})}
        self.log = traces and {"name": Path(traces["file"]).name, **traces}  # of `g2po credit`
        self.steps_per_iteration: int | None = described.get("optimizer_steps_per_iteration")
        self.index = index_of(self.folder)
        is_run = self.numbers or self.sets() or (live and described)
        remedy = "it holds no trajectories, pass the output_dir of a run or an evaluation with them"
        require(bool(is_run), "folder", str(folder), remedy)

    def about(self) -> dict[str, Any]:
        """Return name and settings."""
        settings = {"estimator_name": self.settings.get("advantage_estimator"), **self.settings, **(self.log or {})}
        names = [name for name in _SETTINGS if name != "value_lambda" or is_g2po(self.settings)]  # only G2PO reads it
        shown = {name: _as_text(settings[name]) for name in names if settings.get(name) is not None}
        return {"name": self.name, "settings": shown}

    def sets(self) -> list[EpisodeSet]:
        """Return the evaluations whose trajectories were saved."""
        return sets_of_run(self.folder, self._evaluations(), self._prompts)

    def overview(self) -> dict[str, Any]:
        """Return settings, curves, phase times and evaluations, the data shown before an iteration is chosen."""
        curves, steps = [], self.steps_per_iteration
        for place, entry in enumerate(load_log(self.folder), 1):
            times = {name.removeprefix("time/"): entry[name] for name in entry if name.startswith("time/")}
            values = {one.short: entry.get(f"episode/{one.name}") for one in METRICS if one.short}
            values = {name: value for name, value in values.items() if value is not None}
            curves.append({"n": -(-entry["step"] // steps) if steps else place, **values, "times": times})
        last = self.settings.get("max_steps") or 0
        return {
            **self.about(),
            "folder": shlex.quote(str(self.folder)),  # in commands to copy
            "log": self.log,
            "optimizer_steps_per_iteration": steps,
            "planned": -(-last // steps) if steps and last > 0 else None,  # iterations
            "curves": curves,
            "evaluations": self._evaluations(),
            "iterations": self.numbers,
        }

    def iteration(self, number: int, prompts: bool = True) -> dict[str, Any]:
        """Return the groups of a rollout with their graphs, advantages and steps; if `prompts`, with their texts.

        `value_lambda` is that of the node values with G2PO; `None` for other estimators, whose node values are mean
        returns. `unfinished`: number of incomplete lines, which are skipped.
        """
        read = load_iteration(self.folder, number)
        settings = self.settings
        value_lambda = settings.get("value_lambda", 1.0) if is_g2po(settings) else 1.0
        texts = Texts(self.folder)
        decode = self._prompts if prompts else None
        shown = [group_data(group, texts, settings, value_lambda, decode) for group in read.groups]
        return {
            "n": number,
            "value_lambda": value_lambda if is_g2po(settings) else None,
            "unfinished": read.unfinished,
            "groups": shown,
            "texts": texts.all,
        }

    def _evaluations(self) -> list[dict[str, Any]]:
        return [*load_evaluations(self.folder), *load_exams(self.folder)]


def _as_text(value: Any) -> Any:
    """Return an object as `name value, name value`, and other values unchanged."""
    return ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else value
