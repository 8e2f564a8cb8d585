"""Find recipes and their configurations by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..environments.loading import beside
from ..utils.errors import G2POError
from .parser import read_config

RECIPES = Path(find_spec("g2po_recipes").origin).parent  # scripts, and their YAML files in folders
OWN_RECIPE = "environment"
# Keys of a configuration that are paths.
_PATHS = ("output_dir", "model_name_or_path", "tasks", "eval_tasks", "chat_template", "train_config", "demonstrations")


def recipes_of(command: str) -> dict[str, Path]:
    """Return the scripts of `g2po train` or `g2po teach` by name, with that of a user's own environment or agent."""
    scripts = sorted(RECIPES.glob(f"{command}_*.py"))
    return {path.stem.removeprefix(f"{command}_").replace("_", "-"): path for path in scripts}


def find_config(name: str, option: str = "config", kind: str = "") -> Path:
    """Return a YAML file by its path, or a bundled one by its name: `alfworld/tiny`, or `tiny` with `kind="alfworld"`.

    Raises:
        G2POError: if there is none; it names `option`.
    """
    file = f"{name.removesuffix('.yaml')}.yaml"
    for path in (Path(name), RECIPES / kind / file, RECIPES / file):
        if path.is_file():
            return path
    others = () if kind else ("accelerate", "agents", "teach")
    paths = (path for path in RECIPES.glob(f"{kind or '*'}/*.yaml") if path.parent.name not in others)
    names = ", ".join(sorted(f"{path.parent.name}/{path.stem}" for path in paths))
    raise G2POError(f"{option} is {name!r}, which is not a file: pass one, or one of {names}", option, name)


def keys_beside(flags: Mapping[str, Any], name: str = "config.yaml") -> dict[str, Any]:
    """Return the keys of a configuration next to the file of the `environment` or `agent` in `flags`.

    Relative paths in it start in that folder.
    """
    if (path := _beside(flags, name)) is None:
        return {}
    keys = read_config(path)
    for key, value in keys.items():
        if key in _PATHS and isinstance(value, str) and (key == "output_dir" or (path.parent / value).exists()):
            keys[key] = str(path.parent / value)
    return keys


def tasks_beside(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return tasks.jsonl next to the file of the `environment` or `agent` as `tasks`, if it exists."""
    path = _beside(given, "tasks.jsonl")
    return {} if path is None else {"tasks": str(path)}


def _beside(given: Mapping[str, Any], name: str) -> Path | None:
    path = beside(given.get("environment") or given.get("agent"), name)
    return path and Path(os.path.relpath(path))
