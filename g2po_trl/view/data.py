"""A training run as plain data for the page: curves and settings first, then one iteration at a time."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from ..runs.iterations import load_evaluations, load_iteration, load_log, trajectory_files
from ..runs.metrics import METRICS
from ..runs.run_json import read_run
from ..runs.verdict import verdict_of
from ..utils.options import require
from .episode_sets import EpisodeSet, sets_of_run
from .groups import group_data, lambda_of
from .index import index_of
from .texts import Prompts, Texts

_SETTINGS = (
    "file state_key estimator_name gamma value_lambda step_advantage_weight invalid_action_penalty estimator_kwargs "
    "learning_rate beta num_generations max_turns temperature seed"
).split()


class Run:
    """A training run's folder, or one of `g2po credit`, read on demand.

    Raises `ValueError` without trajectories; a run that is `live` may have none yet.
    """

    def __init__(self, folder: str | Path, live: bool = False):
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.numbers = list(trajectory_files(self.folder))
        described = self._described = read_run(self.folder) if (self.folder / "run.json").is_file() else {}
        model, traces = described.get("model"), described.get("traces")
        model = model.get("model_name_or_path") if isinstance(model, dict) else model  # a recipe's, by TRL's arguments
        taught = self.folder / "validations" / "results.json"
        validations = json.loads(taught.read_text()) if taught.is_file() else []
        self.evaluations = [*load_evaluations(self.folder), *({"name": "validation", **one} for one in validations)]
        self._prompts = Prompts(self.folder, model)
        self.settings = {**described.get("trainer", {}), **described.get("estimator", {})}
        self.log = traces and {"name": Path(traces["file"]).name, **traces}  # of `g2po credit`
        self.index = index_of(self.folder)
        is_run = self.numbers or self.sets() or (live and described)
        remedy = "it holds no trajectories, pass the output_dir of a run or an evaluation with them"
        require(bool(is_run), "folder", str(folder), remedy)

    def about(self) -> dict[str, Any]:
        """Return name and settings."""
        settings = {"estimator_name": self.settings.get("advantage_estimator"), **self.settings, **(self.log or {})}
        if lambda_of(self.settings) is None:  # then nothing reads it
            settings["value_lambda"] = None
        given = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
        shown = {name: value if isinstance(value, (int, float)) else str(value) for name, value in given.items()}
        return {"name": self.name, "settings": shown}

    def sets(self) -> list[EpisodeSet]:
        """Return the evaluations whose trajectories were saved."""
        return sets_of_run(self.folder, self.evaluations, self._prompts)

    def overview(self) -> dict[str, Any]:
        """Return settings, curves, phase times and evaluations, the data shown before an iteration is chosen."""
        curves, steps = [], self._described.get("optimizer_steps_per_iteration")
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
            "evaluations": self.evaluations,
        }

    def iteration(self, number: int, prompts: bool = True) -> dict[str, Any]:
        """Return the groups of a rollout with their graphs, advantages and steps; if `prompts`, with their texts.

        `value_lambda`: see `lambda_of`. `unfinished`: number of incomplete lines, which are skipped. `verdict`: why
        there was nothing to learn from, and what to do; else "".
        """
        read, texts = load_iteration(self.folder, number), Texts(self.folder)
        decode = self._prompts if prompts else None
        shown = [group_data(group, texts, self.settings, decode) for group in read.groups]
        facts = {"n": number, "value_lambda": lambda_of(self.settings), "unfinished": read.unfinished}
        facts["verdict"] = str(verdict_of(read.groups, self._described) or "")
        return {**facts, "groups": shown, "texts": texts.all}
