"""Load environments and other objects by name, as given on a command line or in run.json."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..prompts.template import PromptTemplate
from ..utils.errors import G2POError
from ..utils.options import require
from .causes import in_words, where_raised
from .contract import TextEnvironment

FOLDERS: list[Path] = []  # of imported files, which import the files next to them by name


def load(name: str) -> Any:
    """Return an object by its name. Raises `G2POError` if it does not exist or cannot be imported.

    A name is `module:Class`, `file.py:Class`, `file.py` with one environment, or the URL of an OpenEnv server.
    """
    if name.startswith(("http://", "https://")):
        from g2po_envs.adapters.openenv import RemoteEnvironment

        return partial(RemoteEnvironment, [name])
    module, _, attribute = resolve_environment_name(name).rpartition(":")
    try:
        return getattr(import_named(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # also of "" and relative names
        why = f"{name!r} cannot be loaded ({error}): write module:Class or file.py:Class"
        raise G2POError(why, "environment", name) from error


def bundled_environments() -> dict[str, Path]:
    """Return the folders of the bundled environments by name: those in `g2po_envs` with evaluation panels."""
    import g2po_envs

    return {path.parent.name: path.parent for path in sorted(Path(g2po_envs.__file__).parent.glob("*/panels.py"))}


def load_template(name: str) -> PromptTemplate:
    """Return the prompt template of a name, as for `load`."""
    template = load(name) if ":" in str(name) else None
    remedy = "write module:TEMPLATE or file.py:TEMPLATE, the name of a PromptTemplate"
    require(isinstance(template, PromptTemplate), "prompt", name, remedy)
    return template


def file_of(name: str | None) -> Path:
    """Return the file of `file.py:NAME` or `file.py`; of other names, something without the suffix `.py`."""
    return Path(name if name and name.endswith(".py") else (name or "").rpartition(":")[0])


def beside(name: str | None, file: str) -> Path | None:
    """Return a file in the folder of `file.py:NAME` or `file.py`, such as tasks.jsonl, if it is there."""
    path = file_of(name)
    return path.with_name(file) if path.suffix == ".py" and path.with_name(file).is_file() else None


def import_named(module: str) -> ModuleType:
    """Return the module of a file, `file.py`, or the one of that name."""
    if module.endswith(".py"):
        return import_file(module)
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())  # not "": workers get this path, and may run in another folder
    return importlib.import_module(module)


def import_file(path: str | Path) -> ModuleType:
    """Return the module of a file. Its folder is appended to `sys.path`, for imports by name, also in workers."""
    path = Path(path).resolve()
    require(path.is_file(), "environment", str(path), "there is no such file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    FOLDERS.append(path.parent)
    importlib.invalidate_caches()
    for file in path.parent.glob("*.py"):  # another folder's would be imported in place of a neighbour
        source = Path(getattr(sys.modules.get(file.stem), "__file__", None) or file).resolve()
        fits = source == file or (file != path and source.parent not in FOLDERS)
        require(fits, "environment", str(file), f"a process imports one {file.name}, here {source}: rename one")
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        message = f"{path} cannot be imported: {in_words(error)}{where_raised(error)}"
        raise G2POError(message, "environment", str(path)) from error
    source = getattr(module, "__file__", None) or "a built-in module"
    remedy = f"a process imports one {path.name}, here {source}: rename it"
    require(Path(source).resolve() == path, "environment", str(path), remedy)
    return module


def resolve_environment_name(name: str) -> str:
    """Return `/folder/file.py:Class` for an environment's file, also without the class; other names unchanged."""
    return _resolve(name, _is_environment, "environment", "TextEnvironment")


def resolve_agent_name(name: str) -> str:
    """Return the full name of an agent, as `resolve_environment_name` does of an environment."""
    is_name = not name.startswith(("http:", "https:")) and (":" in name or name.endswith(".py"))
    require(is_name, "agent", name, "write FILE.py, or FILE.py:NAME, with a function (task, client)")
    return _resolve(name, _is_agent, "agent", "public function (task, client)")


def _resolve(name: str, fits: Callable[[Any, str], bool], field: str, wanted: str) -> str:
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    if not path.endswith(".py") or path.startswith(("http:", "https:")):
        return name
    module = import_file(path)
    matches = [found for found, value in vars(module).items() if found[0] != "_" and fits(value, module.__name__)]
    is_found = hasattr(module, attribute) if attribute else len(matches) == 1
    remedy = f"write {path}:{(matches or ['NAME'])[0]}; it contains {', '.join(matches) or f'no {wanted}'}"
    require(is_found, field, name, remedy)
    return f"{Path(path).resolve()}:{attribute or matches[0]}"


def _is_environment(value: Any, module: str) -> bool:
    is_own = inspect.isclass(value) and value.__module__ == module
    return is_own and (issubclass(value, TextEnvironment) or {"reset", "get_reward"} <= {*dir(value)})


def _is_agent(value: Any, module: str) -> bool:
    """Return whether an object of a module takes `(task, client, …)`, as functions and `AgentCommand`s do."""
    if inspect.isclass(value) or (inspect.isfunction(value) and value.__module__ != module):
        return False
    try:
        return list(inspect.signature(value).parameters)[:2] == ["task", "client"]
    except (TypeError, ValueError):  # it cannot be called, or is written in C
        return False
