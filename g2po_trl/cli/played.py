"""What a command plays: an environment, an agent or a run by its name, and their tasks."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environments.adapters.mixed import mixed
from ..environments.loading import load
from ..environments.tasks import read_tasks
from ..runs.run_json import load_object, read_run
from ..utils.errors import G2POError
from .parser import json_object

ENVIRONMENT = "environment.py"


def environment_and_tasks(
    name: str, given: Sequence[str] = (), file: Path | None = None
) -> tuple[Callable, list[dict[str, Any]]]:
    """Return an environment's factory, by the names that `load` takes or a run's folder, and its tasks.

    See `tasks_of`; of a run, the default is its first panel.
    """
    if Path(name).is_dir():
        return environment_of(read_run(name), name), tasks_of(name, given, file or (None if given else panel_of(name)))
    if name == ENVIRONMENT and not Path(name).is_file():
        raise G2POError("there is no environment.py here: name an environment, as file.py or module:Class")
    return mixed(load(name)), tasks_of(name, given, file)


def tasks_of(name: str, given: Sequence[str] = (), file: Path | None = None) -> list[dict[str, Any]]:
    """Return the tasks in JSON or a file, by default tasks.jsonl beside file.py; else one without arguments."""
    path = Path(name.rpartition(":")[0] if ":" in name else name)
    if not given and file is None and path.suffix == ".py" and path.with_name("tasks.jsonl").is_file():
        file = path.with_name("tasks.jsonl")
    return [*map(_task, given), *(read_tasks(file) if file else [])] or [{}]


def _task(text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ArgumentTypeError as error:
        why = f" ({error.__cause__})" if error.__cause__ else ""
        raise G2POError(f"task is {text:.80}{why}: write a JSON object, such as '{{\"seed\": 1}}'") from error


def environment_of(run: Mapping[str, Any], folder: str | Path) -> Callable:
    """Return the environment of a run's description."""
    if not run:
        raise G2POError(f"{folder} has no run.json, which names the environment: pass FILE.py:Class and --task")
    if not run.get("environment"):
        raise G2POError(
            f"environment is missing in {folder}/run.json, since it cannot be imported: pass FILE.py:Class"
        )
    return load_object(run["environment"])


def panel_of(folder: str | Path) -> Path:
    """Return the file with the tasks of a run's first panel."""
    panels = sorted(Path(folder, "panels").glob("*.jsonl"))
    if not panels:
        raise G2POError(f"{folder} had no evaluation tasks (no file in panels/): pass --tasks FILE")
    return panels[0]
