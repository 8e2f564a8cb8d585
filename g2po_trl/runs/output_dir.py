"""`output_dir`: run.json, panels/, evaluations.jsonl, trajectories/ and the model card. It belongs to one run."""

from __future__ import annotations

import json
import os
import re
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..environments.tasks import tasks_hash
from ..trajectory import Trajectory, write_jsonl
from ..utils.json import read_json_lines, write_json, write_json_lines
from ..utils.masking import masked
from .changes import changed_lines, next_parts, parts_of
from .checkpoint import find_checkpoint, run_id_of
from .ownership import (
    SUPERSEDED,
    FolderLock,
    check_free,
    checkpoints_in,
    delete_run,
    has_weights,
    occupied,
    remove,
    step_of,
    what_is_in,
)
from .run_json import FILE, read_run

_RESERVED = ("train", "replaced")  # the trajectories of training


def check_panel_name(name: str, option: str = "metric_key_prefix") -> None:
    """Refuse names of panels that would be another file's, or a file elsewhere; the message names the option."""
    if name in _RESERVED:
        raise ValueError(
            f"{option} is {name!r}, which names the trajectories of training: choose another, e.g. 'eval_{name}'"
        )
    if not re.fullmatch(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]*", name):
        raise ValueError(
            f"{option} is {name!r}, which names files in output_dir: choose a name without a slash, a backslash or a "
            "control character that does not begin with a dot"
        )


class RunFolder:
    """What a run leaves beside its model and checkpoints.

    Args:
        path: `output_dir`.
        save_trajectories: keep every trajectory.
        rank, num_ranks: each rank writes its own training trajectories, the main process all else.

    `evaluations`: those of this run so far, as evaluations.jsonl has them. `settings`: what a recipe adds to run.json.
    `run_id`: names the run in run.json and in its checkpoints; `None` for one that an older version began.
    """

    def __init__(self, path: str | Path, save_trajectories: bool, rank: int = 0, num_ranks: int = 1):
        self.path, self.save_trajectories = Path(path), save_trajectories
        self.rank, self.num_ranks = rank, num_ranks
        self.evaluations: list[dict[str, Any]] = []
        self._made_after: list[dict[str, Any]] = []
        self.settings: Mapping[str, Any] = MappingProxyType({})
        self.run_id: str | None = uuid.uuid4().hex
        self.parts: list[dict[str, Any]] = parts_of({})
        self.is_ours = False
        self._lock = FolderLock(path)
        self._kept_back: list[tuple[Path, Sequence[Trajectory]]] = []

    # -- whose it is -----------------------------------------------------------------------------------------------

    def begin(
        self,
        resume_from_checkpoint: str | bool | None,
        overwrite: bool,
        identity: Mapping[str, Any],
        model: str = "",
    ) -> str | None:
        """Take the folder for this run and lock it, on the main process. `release` gives the lock back.

        Args:
            resume_from_checkpoint: see `find_checkpoint`.
            overwrite: delete the run that the folder holds.
            identity: settings that must be equal when a run is resumed.
            model: where the weights came from.

        Returns:
            The checkpoint to resume from, or `None` to start from scratch.

        Raises:
            ValueError: if another process writes here, another run is here, the checkpoint belongs to another run or
                does not exist, or the initial model is in this folder.
        """
        self._hold()
        try:
            return self._begin(resume_from_checkpoint, overwrite, identity, model)
        except BaseException:
            self.release()
            raise

    def _hold(self) -> None:
        if not self._lock.acquire():
            raise ValueError(
                f"output_dir is {str(self.path)!r}, and {self._lock.holder()} is training there: wait for it, end it, "
                "or pass another --output_dir"
            )

    def release(self) -> None:
        """Let other processes in."""
        self._lock.release()

    def _begin(
        self, resume: str | bool | None, overwrite: bool, identity: Mapping[str, Any], model: str
    ) -> str | None:
        here = read_run(self.path) if (self.path / FILE).is_file() else {}
        ours = self.is_ours and here.get("run_id") == self.run_id
        if not ours:
            check_free(self.path, resume, overwrite)
        checkpoint = find_checkpoint(resume, self.path)
        if checkpoint is None and model and has_weights(model) and Path(model).resolve() == self.path.resolve():
            raise ValueError(
                f"output_dir is {str(self.path)!r}, the folder of the model that is trained, whose weights the run "
                "would replace: pass another --output_dir"
            )
        if checkpoint is not None:
            self._check_run_of(Path(checkpoint), here, ours)
            self.run_id = run_id_of(checkpoint)
        elif not ours:
            self._make_room(resume, overwrite, here, identity, model)
        return checkpoint

    def take(self, resumed: bool) -> None:
        """Nothing is in the way any more: the folder is this run's, and gets the evaluations made before it was."""
        self.is_ours = True
        if resumed:
            self._kept_back = []
        else:
            self._write_kept_back()

    def _check_run_of(self, checkpoint: Path, here: Mapping[str, Any], ours: bool) -> None:
        theirs = run_id_of(checkpoint)
        if here and here.get("run_id") == theirs:
            return
        if checkpoint.resolve().parent != self.path.resolve():
            if not ours and (error := occupied(self.path)):
                raise error
        elif here:
            raise ValueError(
                f"{str(checkpoint)!r} is a checkpoint of another run than {self.path / FILE} describes: delete the "
                "one you do not want, or pass another --output_dir"
            )

    def _make_room(
        self, resume: str | bool | None, overwrite: bool, here: Mapping[str, Any], identity: Mapping[str, Any], model
    ) -> None:
        """For a run that begins: what is here is to be overwritten, or was stopped before its first checkpoint."""
        if not (error := occupied(self.path)):
            return
        same = json.loads(json.dumps(identity)) == here.get("identity")
        starts_again = resume and same and not has_weights(self.path) and not checkpoints_in(self.path)
        found = ", ".join(what_is_in(self.path))
        if resume and not overwrite and not starts_again and "run.json" in found:
            raise ValueError(
                f"output_dir is {str(self.path)!r}, which holds no checkpoint to continue, but another run ({found}): "
                "pass --overwrite to delete it, or another --output_dir"
            )
        if not overwrite and not starts_again:
            raise error
        if overwrite and model and Path(model).resolve().is_relative_to(self.path.resolve()):
            raise ValueError(
                f"model_name_or_path is {model!r}, in the output_dir {str(self.path)!r} that overwrite would delete: "
                "pass another --output_dir"
            )
        delete_run(self.path)
        why = "overwrite" if overwrite else "it was stopped before its first checkpoint and starts again"
        print(f"{self.path}: the earlier run ({found}) is deleted: {why}", flush=True)

    def leave_behind(self, step: int, iteration: int) -> None:
        """Of a run that goes on after `step` and `iteration`: what it had written later is another continuation's.

        Its trajectories are played again and deleted here; its checkpoints keep a name that `auto` does not take.
        """
        later = [checkpoint for checkpoint in checkpoints_in(self.path) if step_of(checkpoint) > step]
        for checkpoint in later:
            aside = checkpoint.with_name(f"{SUPERSEDED}{checkpoint.name}")
            if aside.exists():
                remove(aside)
            os.rename(checkpoint, aside)
        if later:
            names = ", ".join(checkpoint.name for checkpoint in later)
            print(f"The run goes on from step {step}. {names}: kept as {SUPERSEDED}checkpoint-…", flush=True)
        evaluated = {(entry["name"], entry["step"]) for entry in self.evaluations}
        for path in self.path.glob("trajectories/*.jsonl"):
            found = re.fullmatch(r"(.+)-(\d{6,})(-rank\d+)?", path.stem)
            if found and found[1] in _RESERVED:
                outdated = int(found[2]) > iteration
            else:
                outdated = found and int(found[2]) > step and (found[1], int(found[2])) not in evaluated
            if outdated:
                path.unlink()
        state = self.path / "trainer_state.json"
        if state.is_file() and (_global_step(state) or 0) > step:
            state.unlink()

    # -- what is written -------------------------------------------------------------------------------------------

    @property
    def has_description(self) -> bool:
        """Whether run.json is there."""
        return (self.path / FILE).is_file()

    def write_run(
        self,
        description: Mapping[str, Any],
        panels: Mapping[str, Sequence[Mapping[str, Any]]],
        step: int = 0,
    ) -> None:
        """Write run.json, without anything that looks like a secret, and the rows of each panel.

        Changes of settings by a run that is resumed after `step` are printed and kept in run.json, see
        `changes`.
        """
        description = masked({**description, **self.settings})
        before = read_run(self.path) if step and (self.path / FILE).is_file() else {}
        if before:
            self.parts = next_parts(before, step, description)
            for line in changed_lines([part for part in self.parts if part["first_step"] == step + 1]):
                print(f"  {line}", flush=True)
        else:
            self.parts = parts_of({})
        written = {"run_id": self.run_id, "folder": str(self.path.resolve()), **description, "parts": self.parts}
        write_json(self.path / FILE, written, indent=2)
        for name, rows in panels.items():
            # As written, also NaN and half a character: `g2po evaluate` plays these rows again.
            lossless = {"ensure_ascii": True, "allow_nan": True}
            write_json_lines(self.path / "panels" / f"{name}.jsonl", rows, **lossless)

    def take_for_evaluation(self) -> bool:
        """Before `train`, on the main process: whether the folder is this run's, or has become it now.

        One that another run or process has is left as it is, until `train` takes or refuses it.
        """
        if self.is_ours and self.has_description and read_run(self.path).get("run_id") != self.run_id:
            self.is_ours = False  # another has overwritten it since
        if not self.is_ours and not occupied(self.path) and self._lock.acquire():
            self.release()
            self.is_ours = True
            return True
        return False

    def add_evaluation(
        self,
        name: str,
        step: int,
        temperature: float,
        summary: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write an evaluation, summarized by `summarize`, and its trajectories. `rows`: of the panel, each once."""
        entry = {
            "name": name,
            "step": step,
            "panel": tasks_hash(map(dict, rows)),
            "temperature": temperature,
            **summary,
        }
        self.evaluations.append(entry)
        if self.save_trajectories:
            self._kept_back.append((self.path / "trajectories" / f"{name}-{step:06d}.jsonl", trajectories))
        if self.is_ours:
            self._write_kept_back()
        else:
            warnings.warn(
                f"output_dir is {str(self.path)!r}, which holds another run: this evaluation is not written there",
                stacklevel=4,
            )

    def _write_kept_back(self) -> None:
        for path, trajectories in self._kept_back:
            write_jsonl(path, trajectories)
        self._kept_back = []
        if self.evaluations:
            self.write_evaluations()

    def write_evaluations(self) -> None:
        """Write this run's evaluations, without any that a killed run made after its checkpoint."""
        write_json_lines(self.path / "evaluations.jsonl", self.evaluations)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the evaluations so far."""
        return self.evaluations

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned; the file then has these evaluations and no later ones."""
        path = self.path / "evaluations.jsonl"
        made = read_json_lines(path) if path.is_file() else []
        self._made_after = made[len(state) :] if made[: len(state)] == state else []
        self.evaluations = state
        if self.rank == 0:
            self.write_evaluations()

    def keep_evaluations_of(self, step: int) -> None:
        """After `load_state_dict`: keep those of the checkpoint's own step that were made after it was saved.

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


def _global_step(state: Path) -> int | None:
    """Return the step in a trainer_state.json; `None` if it cannot be read."""
    try:
        return int(json.loads(state.read_bytes())["global_step"])
    except (ValueError, KeyError, TypeError):
        return None
