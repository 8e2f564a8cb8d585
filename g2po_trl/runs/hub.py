"""Pushes to the Hub: their files, and the consequences of a rejection for the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from transformers import Trainer

from ..environments.causes import in_words
from ..utils.json import atomic_write
from .ownership import LOCK, STAGING, SUPERSEDED

logger = logging.getLogger(__name__)

# Not for the Hub: every prompt and completion of a run, the tasks it is judged by, checkpoints that are not complete
# or not continued, and transformers' pickle of all arguments, tokens included. The other checkpoints are pushed as
# `hub_strategy` says.
_NOT_PUSHED = ("trajectories/", "panels/", "report/", "exams/", f"{STAGING}/", f"{SUPERSEDED}checkpoint-*/", LOCK)
_NOT_PUSHED += ("view*.html", "view*-data/", "training_args.bin")
_REFUSED_BY_HUB = (400, 401, 403, 404)


class HubError(RuntimeError):
    """The upload to the Hub failed. The model is on disk; the message says where, and what to do."""


@contextmanager
def repository_made(hub_model_id: str | None, output_dir: str) -> Iterator[None]:
    """Raise `HubError` if the Hub rejects a repository; if it does not answer, warn and continue."""
    try:
        yield
    except Exception as error:  # of the Hub, or of the connection to it
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, (HFValidationError, LocalTokenNotFoundError)) or status in _REFUSED_BY_HUB:
            raise HubError(
                f"the Hub rejects {hub_model_id or Path(output_dir).name!r}: {error}. Set hub_model_id, log in with "
                "`hf auth login`, or set push_to_hub=False."
            ) from error
        logger.warning(f"The Hub does not answer ({in_words(error)}); trying again when there is something to push.")


def ready_to_push(trainer: Any) -> bool:
    """Return whether a push in the background can begin, with a repository and a list of files that are not pushed."""
    jobs = trainer.push_in_progress.jobs if trainer.push_in_progress is not None else []
    for error in [job.exception() for job in jobs if job.done() and job.exception()]:
        logger.warning(f"A push to the Hub failed ({in_words(error)}); the next push uploads what is missing.")
    if trainer.hub_model_id is None:
        trainer.init_hf_repo()
    if not trainer.is_world_process_zero():
        return True
    if trainer.hub_model_id is None:  # the Hub does not answer
        return False
    _write_gitignore(trainer.args.output_dir)
    return True


@contextmanager
def model_pushed(trainer: Any, token: str | None = None, **of_repository: Any) -> Iterator[None]:
    """Push the trainer's model in the block. It is on disk afterwards, even if the Hub rejects it (`HubError`)."""
    folder, args = trainer.args.output_dir, trainer.args
    try:
        if trainer.hub_model_id is None:
            try:
                Trainer.init_hf_repo(trainer, token, **of_repository)
            except Exception:  # an earlier model may be on disk
                trainer.save_model(folder)
                raise
        if trainer.is_world_process_zero():
            _write_gitignore(folder)
        yield
    except Exception as error:
        private = of_repository.get("private")
        private = args.hub_private_repo if private is None else private  # as transformers reads it
        raise HubError(
            f"the model was not pushed to the Hub: {in_words(error)}\nIt is in {folder!r}. To push it later:\n"
            f"    hf upload {trainer.hub_model_id or args.hub_model_id or Path(folder).name} {quote(str(folder))} "
            + "--private " * bool(private)
            + " ".join(f"--exclude '{name}{'*' * name.endswith('/')}'" for name in (*_NOT_PUSHED, "checkpoint-*/"))
        ) from error


def _write_gitignore(folder: str | Path) -> None:
    with atomic_write(Path(folder, ".gitignore")) as file:
        file.writelines(f"{name}\n" for name in _NOT_PUSHED)
