"""Find recipes and their configurations by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OWN_RECIPE = "environment"


def recipes_folder() -> Path:
    """Return the folder of recipes and their YAML files: the clone's, or the installed package's."""
    beside = Path(__file__).resolve().parents[2] / "recipes"
    if (beside / "train_alfworld.py").is_file():
        return beside
    spec = find_spec("g2po_recipes")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("g2po_recipes is missing: reinstall g2po-trl")
    return Path(next(iter(spec.submodule_search_locations)))


def recipe_names() -> list[str]:
    """Return the recipes that `g2po train` takes by name."""
    found = (path.stem.removeprefix("train_") for path in recipes_folder().glob("train_*.py"))
    return sorted(name.replace("_", "-") for name in found if name != OWN_RECIPE)


def config_names(kind: str | None = None) -> list[str]:
    """Return the configurations that `--config` takes by name; with `kind`, the names of files in recipes/KIND."""
    folder = recipes_folder()
    if kind is not None:
        return sorted(path.stem for path in (folder / kind).glob("*.yaml"))
    paths = [path for path in folder.glob("*/*.yaml") if path.parent.name not in ("accelerate", "agents", "teach")]
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths)


def find_config(name: str, option: str = "config", kind: str | None = None, among: str | None = None) -> Path:
    """Return a YAML file by its path, or a bundled one by its short name, relative to the folder `kind` of recipes/.

    The error names `option`, and lists the configurations in the folder `among`.
    """
    if Path(name).is_file():
        return Path(name)
    folder = recipes_folder() / (kind or "")
    if (found := folder / f"{name.removesuffix('.yaml')}.yaml").is_file():
        return found
    names = [f"{among}/{one}" for one in config_names(among)] if among else config_names(kind)
    raise ValueError(f"{option} is {name!r}, which is not a file: pass one, or one of {', '.join(names)}")


def bundled_model(target: str | None) -> str | None:
    """Return the folder of the model that a recipe trains by default, or `None`."""
    if target not in recipe_names():
        return None
    found = find_spec(f"g2po_envs.{target.partition('-')[0]}")
    folder = Path(found.origin).with_name("tiny_model") if found and found.origin else None
    return str(folder) if folder and folder.is_dir() else None
