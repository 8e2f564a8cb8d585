"""Ownership of a folder: its lock, the files of a run in it, and the files that `overwrite` deletes."""

from __future__ import annotations

import errno
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..utils.adapters import adapters_below
from ..utils.json import write_json
from ..utils.options import require

FILE, LOCK, STAGING, SUPERSEDED = "run.json", ".lock", "unfinished-checkpoint", "superseded-"
_UNLOCKABLE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)  # of NFS without its lock service, and alike
_OTHERS = ("settings.json", "teaching.json")  # of `g2po evaluate` and `g2po teach`


def lock_folder(folder: str | Path, option: str) -> Any:
    """Return the acquired `FileLock` of a folder, which a kill releases; a file system without locks is warned of.

    Raises `G2POError` if another process holds the lock, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # credit of logs does without

    lock = FileLock(Path(folder, LOCK))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        require(False, option, str(folder), "another process is writing there: wait for it, end it, or choose another")
    except OSError as error:
        require(error.errno in _UNLOCKABLE, option, str(folder), f"it cannot be written ({error}): choose another")
        warnings.warn(f"{option} is {str(folder)!r}, which cannot be locked ({error}): use it once", stacklevel=2)
    return lock


@contextmanager
def held(folder: str | Path, option: str) -> Iterator[None]:
    """Lock a folder while the block runs, and remove it if the block wrote nothing. Raises the errors of the lock."""
    lock = lock_folder(folder, option)
    try:
        yield
    finally:
        if {path.name for path in Path(folder).iterdir()} <= {LOCK}:
            shutil.rmtree(folder)
        lock.release()


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, ordered by step."""
    found = (path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted(filter(Path.is_dir, found), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint's folder."""
    return int(checkpoint.name.rpartition("-")[2])


def weights_in(folder: str | Path) -> list[Path]:
    """Return the model in a folder: files with weights, and subfolders with an adapter."""
    files = (path for kind in ("model*", "adapter_model*") for path in Path(folder).glob(f"{kind}.safetensors"))
    return [*files, *adapters_below(folder)]


def read_description(folder: str | Path, name: str = FILE) -> dict[str, Any]:
    """Return run.json, or another such file, as it is written; empty without one. Refuses other data."""
    path, run = Path(folder, name), None
    with suppress(ValueError):
        run = json.loads(path.read_bytes()) if path.is_file() else {}
    require(isinstance(run, dict), name, str(path), "it is no description of a run; restore it, or delete it")
    return run


def kept_in(folder: str | Path) -> list[Path]:
    """Return the results in a folder that must not be lost: those of a run, an evaluation or `g2po teach`."""
    folder = Path(folder)
    found = [path for name in ("evaluations.jsonl", *_OTHERS) if (path := folder / name).is_file()]
    found += [folder / FILE] * ("run_id" not in read_description(folder) and (folder / FILE).is_file())
    found += [*reversed(checkpoints_in(folder)), *weights_in(folder)]
    return found + [folder / "trajectories"] * any(folder.glob("trajectories/*.jsonl"))


def named(kept: list[Path]) -> str:
    """Return the names of these files, in a line."""
    names = [path.name for path in kept]
    return ", ".join(names if len(names) < 5 else [*names[:2], "…", names[-1]])


def check_free(folder: str | Path, resume_from_checkpoint: str | bool | None, overwrite: bool) -> None:
    """Refuse, before a model is loaded, a new run in an occupied folder, and a run both resumed and overwritten."""
    resumes = str(resume_from_checkpoint).lower() not in ("none", "false", "")
    remedy = "it deletes the run that resume_from_checkpoint continues; choose one of them"
    require(not (resumes and overwrite), "overwrite", overwrite, remedy)
    kept, checkpoint = kept_in(folder), str(resume_from_checkpoint)
    is_own = checkpoint in ("auto", "latest", "True") or Path(folder).resolve() in Path(checkpoint).resolve().parents
    others = named([path for path in kept if path.name in _OTHERS])
    require(is_own or not others, "output_dir", str(folder), f"{others} is of no run: pass another output_dir")
    ways = "--resume-from-checkpoint auto to continue it, --overwrite to delete it, or another --output-dir"
    remedy = f"it holds another run ({named(kept)}): pass {ways}"
    require(not kept or resumes or overwrite, "output_dir", str(folder), remedy)


def note_written(folder: str | Path, *names: str) -> None:
    """Add names to `written` in a folder's run.json before the files are written; `overwrite` deletes them."""
    run = read_description(folder)
    if not {*names} <= {*run.get("written", names)}:
        run["written"] = sorted({*run["written"], *names})
        write_json(Path(folder, FILE), run, indent=2)


def delete_run(folder: str | Path) -> None:
    """Delete the files that run.json lists, and run.json last, so that after a kill the folder is still the run's.

    Raises `G2POError`, and deletes nothing, if the folder has other results that must not be lost.
    """
    folder = Path(folder)
    listed = read_description(folder).get("written", [])
    written = [name for name in listed if name not in ("", "..") and Path(name).name == name]
    foreign = [path for path in kept_in(folder) if path.name not in written]
    remedy = f"{named(foreign)} is not in {FILE} and is not deleted: pass another --output-dir"
    require(not foreign, "output_dir", str(folder), remedy)
    for name in [*sorted({*written} - {FILE}), FILE]:
        remove(folder / name)


def remove(path: Path) -> None:
    """Delete a file or a folder. A folder is renamed first, so that a kill leaves no part of it under its name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.parent / STAGING / f"deleted-{path.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    doomed.parent.mkdir(exist_ok=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):  # a checkpoint is being written there
        doomed.parent.rmdir()
