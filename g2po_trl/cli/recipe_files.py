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

OWN_RECIPE = "environment"


def recipes_folder() -> Path:
    """Return the folder of recipes and their YAML files: the clone's, or the installed package's."""
    beside = Path(__file__).resolve().parents[2] / "recipes"
    if (beside / "train_alfworld.py").is_file():
        return beside
    spec = find_spec("g2po_recipes")
    if spec is None or not spec.submodule_search_locations:
        raise G2POError("g2po_recipes is missing: reinstall g2po-trl")
    return Path(next(iter(spec.submodule_search_locations)))


def recipe_names() -> list[str]:
    """Return the recipes that `g2po train` takes by name."""
    found = (path.stem.removeprefix("train_") for path in recipes_folder().glob("train_*.py"))
    return sorted(name.replace("_", "-") for name in found if name != OWN_RECIPE)


def config_names(kind: str = "") -> list[str]:
    """Return the configurations that `--config` takes by name: those in recipes/KIND, by default every training's."""
    others = () if kind else ("accelerate", "agents", "teach")
    paths = recipes_folder().glob(f"{kind or '*'}/*.yaml")
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths if path.parent.name not in others)


def find_config(name: str, option: str = "config", kind: str = "") -> Path:
    """Return a YAML file by its path, or a bundled one by its name: `alfworld/tiny`, or `tiny` with `kind="alfworld"`.

    Raises:
        G2POError: if there is none; it names `option`.
    """
    folder, file = recipes_folder(), f"{name.removesuffix('.yaml')}.yaml"
    for path in (Path(name), folder / kind / file, folder / file):
        if path.is_file():
            return path
    raise G2POError(f"{option} is {name!r}, which is not a file: pass one, or one of {', '.join(config_names(kind))}")


def bundled_model(target: str | None) -> str | None:
    """Return the folder of the model that a recipe trains by default, or `None`."""
    if target not in recipe_names():
        return None
    found = find_spec(f"g2po_envs.{target.partition('-')[0]}")
    folder = Path(found.origin).with_name("tiny_model") if found and found.origin else None
    return str(folder) if folder and folder.is_dir() else None


# Keys of a configuration that are paths.
_PATHS = ("output_dir", "model_name_or_path", "tasks", "eval_tasks", "chat_template", "train_config", "demonstrations")


def keys_beside(flags: Mapping[str, Any], name: str = "config.yaml") -> dict[str, Any]:
    """Return the keys of a configuration next to the file of the `environment` or `agent` in `flags`.

    Relative paths in it start in that folder.
    """
    if (path := _beside(flags, name)) is None:
        return {}
    keys = read_config(path)
    for key in _PATHS:
        value = keys.get(key)
        if isinstance(value, str) and (key == "output_dir" or (path.parent / value).exists()):
            keys[key] = str(path.parent / value)
    return keys


def tasks_beside(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return tasks.jsonl next to the file of the `environment` or `agent` as `tasks`, if it exists."""
    path = _beside(given, "tasks.jsonl")
    return {} if path is None else {"tasks": str(path)}


def _beside(given: Mapping[str, Any], name: str) -> Path | None:
    path = beside(given.get("environment") or given.get("agent"), name)
    return path and Path(os.path.relpath(path))
