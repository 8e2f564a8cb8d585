"""Pushes to the Hub: their files, and the consequences of a rejection for the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from transformers import Trainer

from ..environments.causes import in_words
from ..utils.json import atomic_write
from .ownership import LOCK, STAGING, SUPERSEDED

# Not for the Hub: every prompt and completion of a run, the tasks it is judged by, checkpoints that are not complete
# or not continued, and transformers' pickle of all arguments, tokens included.
_NOT_PUSHED = ("trajectories/", "panels/", "report/", "validations/", f"{STAGING}/", LOCK)
_NOT_PUSHED += (f"{SUPERSEDED}checkpoint-*/", "view*.html", "view*-data/", "training_args.bin")


class HubError(RuntimeError):
    """The upload to the Hub failed. The message says where the model is, and what to do."""


@contextmanager
def repository_made(hub_model_id: str | None, output_dir: str) -> Iterator[None]:
    """Raise `HubError`, before any work, if the repository cannot be made."""
    try:
        yield
    except Exception as error:  # of the Hub, or of the connection to it
        why = f"the Hub rejects {hub_model_id or Path(output_dir).name!r}, or does not answer: {in_words(error)}"
        raise HubError(f"{why}. Set hub_model_id, log in with `hf auth login`, or set push_to_hub=False.") from error


@contextmanager
def model_pushed(trainer: Any, token: str | None = None, private: bool | None = None) -> Iterator[None]:
    """Push the trainer's model in the block. It is on disk afterwards, even if the Hub rejects it (`HubError`)."""
    folder, args = trainer.args.output_dir, trainer.args
    private = args.hub_private_repo if private is None else private  # as transformers reads it
    try:
        if trainer.hub_model_id is None:
            trainer.save_model(folder)
            Trainer.init_hf_repo(trainer, token, private=private)
        if trainer.is_world_process_zero():
            write_gitignore(folder)
        yield
    except Exception as error:
        raise HubError(
            f"the model was not pushed to the Hub: {in_words(error)}\nIt is in {folder!r}. To push it later:\n"
            f"    hf upload {trainer.hub_model_id or args.hub_model_id or Path(folder).name} {quote(str(folder))} "
            + "--private " * bool(private)
            + " ".join(f"--exclude '{name}{'*' * name.endswith('/')}'" for name in (*_NOT_PUSHED, "checkpoint-*/"))
        ) from error


def write_gitignore(folder: str | Path) -> None:
    """Name the files that are not pushed, for uploads of a folder."""
    with atomic_write(Path(folder, ".gitignore")) as file:
        file.writelines(f"{name}\n" for name in _NOT_PUSHED)
