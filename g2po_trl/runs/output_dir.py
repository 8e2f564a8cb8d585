"""`output_dir`: run.json, panels/, evaluations.jsonl, trajectories/ and the model card. It belongs to one run."""

from __future__ import annotations

import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..environments.tasks import tasks_hash
from ..trajectory import Trajectory, write_jsonl
from ..utils.errors import G2POError
from ..utils.json import write_json, write_json_lines
from ..utils.masking import masked
from ..utils.options import require
from . import ownership
from .checkpoint import STATE, check_files, find_checkpoint
from .iterations import load_evaluations
from .ownership import FILE, SUPERSEDED, checkpoints_in, named, read_description, step_of
from .run_json import identity_of, read_run, with_relative_files

_RESERVED = ("train", "replaced")  # the trajectories of training


def check_panel_name(name: str, option: str = "metric_key_prefix") -> None:
    """Refuse a name of an evaluation set that training uses for its trajectories, or that cannot be a file name."""
    is_file_name = re.fullmatch(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]*", name)
    remedy = f"it names files: choose one without slashes and a dot at its beginning, other than {_RESERVED}"
    require(bool(is_file_name) and name not in _RESERVED, option, name, remedy)


class RunFolder:
    """The files of a run except its model and checkpoints; ranks write their trajectories, the main one all others."""

    def __init__(self, path: str | Path, save_trajectories: bool, rank: int = 0, num_ranks: int = 1):
        self.path, self.save_trajectories = Path(path), save_trajectories
        self.suffix = f"-rank{rank}" if num_ranks > 1 else ""
        self.evaluations: list[dict[str, Any]] = []  # of this run so far, as in evaluations.jsonl
        self.settings: Mapping[str, Any] = {}  # entries that a recipe adds to run.json
        self.run_id = uuid.uuid4().hex  # in run.json and in checkpoints
        self.release: Callable[[], None] = lambda: None  # the lock of the folder

    @property
    def is_ours(self) -> bool:
        """Whether run.json describes this run."""
        return read_description(self.path).get("run_id") == self.run_id

    def begin(
        self, resumes: str | bool | None, overwrite: bool, description: Mapping, resumable: Collection[str] = ()
    ) -> str | None:
        """Lock the folder for this run, on the main process, until `release`; return the checkpoint to resume from.

        `resumes` is `train`'s `resume_from_checkpoint`, and `description` this run's, see `describe_run`, of which
        `resumable` fields may change. Raises `G2POError` if another process writes here, the folder holds something
        else, or the checkpoint is damaged, another run's, or not there.
        """
        self.release = ownership.lock_folder(self.path, "output_dir").release
        if not self.is_ours:
            ownership.check_free(self.path, resumes, overwrite)
        checkpoint = find_checkpoint(resumes, self.path)
        if checkpoint is not None:
            check_files(Path(checkpoint))
            run_ids = [read_description(*place).get("run_id") for place in ((self.path,), (checkpoint, STATE))]
            is_inside = Path(checkpoint).resolve().parent == self.path.resolve()
            is_taken = is_inside or (not self.is_ours and bool(ownership.kept_in(self.path)))
            is_other = is_taken and run_ids[0] not in (None, run_ids[1])
            remedy = f"{self.path / FILE} describes another run: pass another --output-dir"
            require(not is_other, "resume_from_checkpoint", checkpoint, remedy)
        elif not self.is_ours:
            self._make_room(overwrite, description, resumable)
        return checkpoint

    def _make_room(self, overwrite: bool, description: Mapping[str, Any], resumable: Collection[str]) -> None:
        """Delete the run in the folder, if it is to be overwritten or was stopped before its first checkpoint."""
        if kept := ownership.kept_in(self.path):
            before, now = (identity_of(run, resumable) for run in (read_run(self.path), description))
            starts_again = not ownership.weights_in(self.path) and before == now
            remedy = f"it holds a run without a checkpoint ({named(kept)}); pass --overwrite, or another --output-dir"
            require(overwrite or starts_again, "output_dir", str(self.path), remedy)
            model = Path(description.get("model") or "/").resolve()
            is_inside = model.exists() and model.is_relative_to(self.path.resolve())
            remedy = f"overwrite would delete it with output_dir={str(self.path)!r}; pass another --output-dir"
            require(not is_inside, "model_name_or_path", str(model), remedy)
            why = "overwrite" if overwrite else "it was stopped before its first checkpoint and starts again"
            print(f"{self.path}: the earlier run ({named(kept)}) is deleted: {why}", flush=True)
        ownership.delete_run(self.path)

    def take(self, checkpoint: str | None, step: int) -> None:
        """Continue the run of a checkpoint, after `load_state_dict`, from its step; `None`: begin this one."""
        shutil.rmtree(self.path / ownership.STAGING, ignore_errors=True)
        if checkpoint is not None:
            self.run_id = read_description(checkpoint, STATE)["run_id"]
            self.evaluations = [entry for entry in self.evaluations if entry["step"] <= step]

    def leave_behind(self, step: int, iteration: int) -> None:
        """Delete trajectories after `step` and `iteration`, and give later checkpoints a name that `auto` ignores."""
        for checkpoint in (one for one in checkpoints_in(self.path) if step_of(one) > step):
            aside = checkpoint.with_name(f"{SUPERSEDED}{checkpoint.name}")
            ownership.note_written(self.path, aside.name)
            ownership.remove(aside)
            checkpoint.rename(aside)
            print(f"The run continues from step {step}: {checkpoint.name} is kept as {aside.name}", flush=True)
        evaluated = {f"{entry['name']}-{entry['step']:06d}" for entry in self.evaluations}
        for path in self.path.glob("trajectories/*.jsonl"):
            found = re.fullmatch(r"(.+)-(\d{6,})(-rank\d+)?", path.stem)
            last = iteration if found and found[1] in _RESERVED else step
            if found and int(found[2]) > last and path.stem not in evaluated:
                path.unlink()
        (self.path / "trainer_state.json").unlink(missing_ok=True)

    def write_run(self, description: Mapping[str, Any], panels: Mapping[str, Sequence] | None = None) -> None:
        """Write run.json, with secrets masked, the tasks of evaluation sets, and the evaluations so far."""
        written = {FILE, "log.jsonl", "trainer_state.json", "evaluations.jsonl"}
        written |= {name for name, has in (("trajectories", self.save_trajectories), ("panels", panels)) if has}
        written |= set(read_description(self.path)["written"]) if self.is_ours else set()
        description = with_relative_files(masked({**description, **self.settings}), self.path)
        run = {"run_id": self.run_id, **description, "written": sorted(written)}
        write_json(self.path / FILE, run, indent=2)
        for name, rows in (panels or {}).items():
            # Lossless, also NaN and half a character: `g2po evaluate` plays these rows again.
            write_json_lines(self.path / "panels" / f"{name}.jsonl", rows, ensure_ascii=True, allow_nan=True)
        self._write_evaluations()

    def take_for_evaluation(self) -> bool:
        """Return whether an evaluation before `train` may write run.json: no other run uses the folder."""
        if not self.is_ours and not ownership.kept_in(self.path):
            with suppress(G2POError):
                ownership.lock_folder(self.path, "output_dir").release()
                return True
        return False

    def add_evaluation(
        self, name: str, step: int, temperature: float, summary: Mapping, played: Sequence[Trajectory], rows: Sequence
    ) -> None:
        """Write an evaluation (`summary`), and what was `played`; it replaces one of this name, step and `rows`."""
        about = {"name": name, "step": step, "panel": tasks_hash(map(dict, rows)), "temperature": temperature}
        earlier = [entry for entry in self.evaluations if any(entry.get(part) != about[part] for part in about)]
        self.evaluations = [*earlier, {**about, **summary}]
        if not self.is_ours:
            where = f"output_dir is {str(self.path)!r}, which holds another run"
            warnings.warn(f"{where}: this evaluation is not written there", stacklevel=4)
            return
        if self.save_trajectories:
            write_jsonl(self.path / "trajectories" / f"{name}-{step:06d}.jsonl", played)
        self._write_evaluations()

    def _write_evaluations(self) -> None:
        path = self.path / "evaluations.jsonl"
        if self.evaluations or path.is_file():
            write_json_lines(path, self.evaluations)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the evaluations so far."""
        return self.evaluations

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned, and what this run has evaluated since."""
        made = load_evaluations(self.path)
        self.evaluations = made if made[: len(state)] == state else state

    def add_rollout(self, iteration: int, played: Sequence[Trajectory], replaced: Sequence[Trajectory] = ()) -> None:
        """Write this rank's trajectories of an iteration, and the `replaced` ones to a separate file."""
        for kind, written in (("train", played), ("replaced", replaced)):
            if self.save_trajectories and (written or kind == "train"):
                write_jsonl(self.path / "trajectories" / f"{kind}-{iteration:06d}{self.suffix}.jsonl", written)
