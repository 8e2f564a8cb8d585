"""Whose folder it is: what of a run is in one, the lock of the process that writes there, what `overwrite` deletes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..utils.adapter_files import ADAPTER_CONFIG, adapters_below

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
STAGING = "unfinished-checkpoint"
SUPERSEDED = "superseded-"
THREE_WAYS = (
    "pass --resume_from_checkpoint auto to continue it, --overwrite to delete it, or another --output_dir "
    "(in a script: train(resume_from_checkpoint='auto'), G2POConfig(overwrite=True), output_dir)"
)
# What a run writes, and nothing else: `overwrite` deletes no other file. README.md is not here, a user may have
# written it; a run's model card takes its place at the end.
_FILES = ("evaluations.jsonl", "log.jsonl", "trainer_state.json", "training_args.bin", "config.json")
_FILES += ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_FILES += ("chat_template.jinja", ADAPTER_CONFIG, "model.safetensors.index.json")
_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors")
_TRAJECTORIES = re.compile(r".+-\d{6,}(-rank\d+)?\.jsonl")
_OTHERS = {"settings.json": "an evaluation of `g2po evaluate`", "teaching.json": "a model of `g2po teach`"}
_HELD: set[int] = set()  # file descriptors of locks


class FolderLock:
    """Holds a folder for one process. The kernel gives it back when the process ends, however it ends."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder, LOCK)
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Whether the folder is held now; without a word also where files cannot be locked, after a warning."""
        if self._descriptor is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            return self._without(error)
        try:
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            return self._without(error)
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        _HELD.add(descriptor)
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give it back, if it is held."""
        if self._descriptor is not None:
            _HELD.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> str:
        """Who holds it, as far as the file says."""
        try:
            return self.path.read_text(encoding="utf-8").strip() or "another process"
        except (OSError, UnicodeDecodeError):
            return "another process"

    def _without(self, error: OSError) -> bool:
        warnings.warn(
            f"{self.path} cannot be locked ({error}): see to it that no other process writes to this folder",
            stacklevel=3,
        )
        return True


@contextmanager
def held(folder: str | Path, option: str) -> Iterator[None]:
    """Hold a folder while the block runs. Where the block has written nothing, no folder is left."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} is {str(folder)!r} and cannot be written ({error}): choose another") from error
    lock = FolderLock(folder)
    if not lock.acquire():
        raise ValueError(
            f"{option} is {str(folder)!r}, and {lock.holder()} is writing there: wait for it, end it, or pass another"
        )
    try:
        yield
    finally:
        if [path.name for path in lock.path.parent.iterdir()] == [LOCK]:
            lock.path.unlink()
            lock.path.parent.rmdir()
        lock.release()


def _give_up_in_child() -> None:
    """Release the lock in a forked child, which would hold it after the death of its parent."""
    for descriptor in _HELD:
        with suppress(OSError):
            os.close(descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_in_child)


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, ordered by step."""
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint's folder."""
    return int(checkpoint.name.rpartition("-")[2])


def what_is_in(folder: str | Path) -> list[str]:
    """Return the names of files in a folder that a run, an evaluation or `g2po teach` wrote."""
    folder = Path(folder)
    found = [name for name in ("run.json", "evaluations.jsonl", *_OTHERS) if (folder / name).is_file()]
    found += [checkpoint.name for checkpoint in checkpoints_in(folder)[-1:]]
    return found + ["trajectories"] * any(folder.glob("trajectories/*.jsonl"))


def occupied(folder: str | Path) -> ValueError | None:
    """Return the error for a new run in this folder; `None` if it is free."""
    found = what_is_in(folder)
    others = [what for name, what in _OTHERS.items() if name in found]
    if others:
        return ValueError(f"output_dir is {str(folder)!r}, which holds {others[0]}: pass another --output_dir")
    if found:
        return ValueError(f"output_dir is {str(folder)!r}, which holds another run ({', '.join(found)}): {THREE_WAYS}")
    return None


def check_free(folder: str | Path, resume_from_checkpoint: str | bool | None, overwrite: bool) -> None:
    """Refuse, before a model is loaded, a new run in an occupied folder, and one to be continued and overwritten."""
    resumes = str(resume_from_checkpoint).lower() not in ("none", "false", "")
    if resumes and overwrite:
        raise ValueError(
            f"overwrite is True and resume_from_checkpoint is {resume_from_checkpoint!r}: one deletes the run in "
            "output_dir, the other continues it; choose one"
        )
    is_run = not set(_OTHERS) & set(what_is_in(folder))
    if not resumes and (error := occupied(folder)) and not (overwrite and is_run):
        raise error


def has_weights(folder: str | Path) -> bool:
    """Whether a model is in it: the one a run saves at its end."""
    found = [path for pattern in _WEIGHTS for path in Path(folder).glob(pattern)]
    return bool(found or adapters_below(folder))


def _written_by_a_run(folder: Path) -> Iterator[Path]:
    """Return the files and folders that a run wrote: checkpoints first and run.json last.

    If the process is killed while they are deleted, the folder still counts as occupied.
    """
    yield from (path for path in checkpoints_in(folder) if (path / "g2po_state.json").is_file())
    yield from (path for path in folder.glob(f"{SUPERSEDED}checkpoint-*") if path.is_dir())
    yield from (path for path in folder.glob("trajectories/*.jsonl") if _TRAJECTORIES.fullmatch(path.name))
    yield from folder.glob("panels/*.jsonl")
    for place in (folder, *adapters_below(folder)):
        yield from (path for pattern in _WEIGHTS for path in place.glob(pattern))
        yield from (path for name in _FILES if (path := place / name).is_file())
    if (folder / "run.json").is_file() and _describes_a_run(folder / "run.json"):
        yield folder / "run.json"


def _describes_a_run(path: Path) -> bool:
    try:
        run = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(run, dict) and "trainer" in run and "versions" in run


def delete_run(folder: str | Path) -> None:
    """Delete what a run has written, and no other file.

    Raises:
        ValueError: when the folder would stay occupied, by what no run of this package wrote. Nothing is deleted then.
    """
    folder = Path(folder)
    written = list(_written_by_a_run(folder))
    occupying = [folder / "run.json", *checkpoints_in(folder), *folder.glob("trajectories/*.jsonl")]
    if foreign := [str(path.relative_to(folder)) for path in occupying if path.exists() and path not in written]:
        raise ValueError(
            f"output_dir is {str(folder)!r}, where {', '.join(foreign)} was not written by a run, and is not deleted: "
            "pass another --output_dir"
        )
    emptied = [folder / "trajectories", folder / "panels", *adapters_below(folder)]
    for path in written:
        remove(path)
    for path in emptied:
        with suppress(OSError):  # it is not there, or holds another's files
            path.rmdir()


def remove(path: Path) -> None:
    """Delete a file, or a folder, which loses its name first: no kill leaves a part of it under that."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    doomed = path.parent / STAGING / f"deleted-{path.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    doomed.parent.mkdir(exist_ok=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):  # a checkpoint is being written there
        doomed.parent.rmdir()
