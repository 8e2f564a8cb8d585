"""`output_dir`: run.json, panels/, evaluations.jsonl, trajectories/ and the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..environments.tasks import tasks_hash
from ..json_text import write_json, write_json_lines
from ..trajectory import Trajectory, write_jsonl
from .run_description import FILE


class RunFolder:
    """What a run leaves beside its model and checkpoints.

    Args:
        path: `output_dir`.
        save_trajectories: keep every trajectory.
        rank, num_ranks: each rank writes its own training trajectories, the main process all else.

    `evaluations`: those of this run so far, as evaluations.jsonl has them. `settings`: what a recipe adds to run.json.
    """

    def __init__(self, path: str | Path, save_trajectories: bool, rank: int = 0, num_ranks: int = 1):
        self.path, self.save_trajectories = Path(path), save_trajectories
        self.rank, self.num_ranks = rank, num_ranks
        self.evaluations: list[dict[str, Any]] = []
        self._made_after: list[dict[str, Any]] = []
        self.settings: Mapping[str, Any] = MappingProxyType({})

    def write_run(self, description: Mapping[str, Any], panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """run.json, see `run_description`, and the panels' rows."""
        write_json(self.path / FILE, {**description, **self.settings}, indent=2)
        for name, rows in panels.items():
            write_json_lines(self.path / "panels" / f"{name}.jsonl", map(dict, rows))

    def add_evaluation(
        self,
        name: str,
        step: int,
        temperature: float,
        summary: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
        rows: Sequence[dict[str, Any]],
    ) -> None:
        """Write an evaluation down, its trajectories beside it."""
        entry = {"name": name, "step": step, "panel": tasks_hash(rows), "temperature": temperature, **summary}
        self.evaluations.append(entry)
        self.write_evaluations()
        if self.save_trajectories:
            write_jsonl(self.path / "trajectories" / f"{name}-{step:06d}.jsonl", trajectories)

    def write_evaluations(self) -> None:
        """The file holds this run's evaluations and no others: not those a killed run made after its checkpoint."""
        write_json_lines(self.path / "evaluations.jsonl", self.evaluations)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps: the evaluations so far."""
        return self.evaluations

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Take up what `state` gave; the file then has these evaluations and no later ones."""
        path = self.path / "evaluations.jsonl"
        made = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
        self._made_after = made[len(state) :] if made[: len(state)] == state else []
        self.evaluations = state
        if self.rank == 0:
            self.write_evaluations()

    def keep_evaluations_of(self, step: int) -> None:
        """After `restore`: keep those of the checkpoint's own step that were made after it was saved.

        They are the last ones of a finished run that goes on to more steps.
        """
        self.evaluations = [*self.evaluations, *(entry for entry in self._made_after if entry["step"] == step)]
        if self.rank == 0:
            self.write_evaluations()

    def add_rollout(
        self, iteration: int, trajectories: Sequence[Trajectory], replaced: Sequence[Trajectory] = ()
    ) -> None:
        """Write this rank's trajectories of an iteration; those that were `replaced` to a file of their own."""
        if not self.save_trajectories:
            return
        suffix = f"-rank{self.rank}" if self.num_ranks > 1 else ""
        for kind, played in (("train", trajectories), ("replaced", replaced)):
            if played or kind == "train":
                write_jsonl(self.path / "trajectories" / f"{kind}-{iteration:06d}{suffix}.jsonl", played)
