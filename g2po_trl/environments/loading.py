"""Load environments and other objects by name, as given on a command line or in run.json."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ..prompts.template import PromptTemplate
from ..utils.errors import G2POError
from .causes import in_words
from .contract import TextEnvironment
from .failures import where_raised

FOLDERS: list[Path] = []  # of imported files, which import the files next to them by name


def load(name: str) -> Any:
    """Return the object that a name refers to.

    Args:
        name: `module:Class`, `package.module:function`, `file.py:Class`, `file.py` with one environment, or the URL of
            an OpenEnv server.

    Raises:
        G2POError: if the object does not exist or cannot be imported.
    """
    if name.startswith(("http://", "https://")):
        from g2po_envs.adapters.openenv import RemoteEnvironment

        return partial(RemoteEnvironment, [name])
    module, _, attribute = resolve_environment_name(name).rpartition(":")
    try:
        if not module or module.startswith("."):
            raise ImportError("write module:Class or file.py:Class")
        return getattr(import_named(module), attribute)
    except (ImportError, AttributeError) as error:
        raise G2POError(f"{name!r} cannot be loaded: {error}", "environment", name) from error


def bundled_environments() -> dict[str, Path]:
    """Return the folders of the bundled environments by name: those in `g2po_envs` with evaluation panels."""
    import g2po_envs

    return {path.parent.name: path.parent for path in sorted(Path(g2po_envs.__file__).parent.glob("*/panels.py"))}


def load_template(name: str) -> PromptTemplate:
    """Return the prompt template of a name, as for `load`."""
    template = load(name) if ":" in str(name) else None
    if not isinstance(template, PromptTemplate):
        remedy = "write module:TEMPLATE or file.py:TEMPLATE, the name of a PromptTemplate"
        raise G2POError(f"prompt is {name!r}, a {type(template).__name__}: {remedy}", "prompt", name)
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
    """Return the module of a file. Its folder is appended to `sys.path`, for imports by name, also in workers.

    Raises:
        G2POError: if the file cannot be imported, or a file of the same name in another folder was.
    """
    path = Path(path).resolve()
    if not path.is_file():
        where = f"there is no file {path.name!r} in {str(path.parent)!r}"
        raise G2POError(f"{path.name!r} cannot be loaded: {where}", "environment", str(path))
    for file in path.parent.glob("*.py"):
        other = Path(getattr(sys.modules.get(file.stem), "__file__", None) or file)
        if other.parent in FOLDERS and other.parent != path.parent:
            raise G2POError(
                f"{path} cannot be imported: {other} was, and a process imports one {file.name}: rename one of them",
                "environment",
                str(path),
            )
    FOLDERS.append(path.parent)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    try:
        spec = find_spec(path.stem)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
            return importlib.import_module(path.stem)
        return _import_under_another_name(path)
    except G2POError:
        raise
    except Exception as error:
        raise G2POError(
            f"{path} cannot be imported: {in_words(error)}{where_raised(error)}", "environment", str(path)
        ) from error


def _import_under_another_name(path: Path) -> ModuleType:
    """Return the module of a file that is called like an installed package, which `import` means in workers."""
    import cloudpickle

    name = f"{path.stem} of {path.parent.name}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        cloudpickle.register_pickle_by_value(module)
    return sys.modules[name]


def resolve_environment_name(name: str) -> str:
    """Return the full name of an environment: `/folder/file.py:Class` for `file.py` with one environment.

    The file is imported. Other names are returned unchanged.

    Raises:
        G2POError: if the file cannot be imported, lacks the class, or contains no environment or several.
    """
    return _resolve(name, _is_environment, "environment", "Class", "contains no TextEnvironment")


def resolve_agent_name(name: str) -> str:
    """Return the full name of an agent, as `resolve_environment_name` does of an environment."""
    if name.startswith(("http:", "https:")) or not (":" in name or name.endswith(".py")):
        remedy = "write FILE.py, or FILE.py:NAME, with a function (task, client)"
        raise G2POError(f"agent is {name!r}: {remedy}", "agent", name)
    return _resolve(name, _is_agent, "agent", "NAME", "contains no public function (task, client) and no AgentCommand")


def _resolve(name: str, fits: Callable[[Any, str], bool], field: str, kind: str, nothing: str) -> str:
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    if not path.endswith(".py") or path.startswith(("http:", "https:")):
        return name
    module = import_file(path)
    matches = [one for one, value in vars(module).items() if one[0] != "_" and fits(value, module.__name__)]
    if not (hasattr(module, attribute) if attribute else len(matches) == 1):
        content = f"contains {', '.join(matches)}" if matches else nothing
        missing = f"has no {attribute}: it {content}" if attribute else content
        raise G2POError(f"{path} {missing}: write {path}:{matches[0] if matches else kind}", field, name)
    return f"{Path(path).resolve()}:{attribute or matches[0]}"


def _is_environment(value: Any, module: str) -> bool:
    """Return whether an object is a class of this module: a `TextEnvironment`, or one in TRL's style."""
    is_own = inspect.isclass(value) and value.__module__ == module
    return is_own and (
        issubclass(value, TextEnvironment) or (hasattr(value, "reset") and hasattr(value, "get_reward"))
    )


def _is_agent(value: Any, module: str) -> bool:
    """Return whether an object of a module takes `(task, client, …)`, as functions and `AgentCommand`s do."""
    if inspect.isclass(value) or (inspect.isfunction(value) and value.__module__ != module):
        return False
    try:
        return list(inspect.signature(value).parameters)[:2] == ["task", "client"]
    except (TypeError, ValueError):  # it cannot be called, or is written in C
        return False
