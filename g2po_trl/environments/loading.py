"""Load environments and other objects by name, as given on a command line or in run.json."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from .file_modules import import_file


def load(name: str) -> Any:
    """Return the object that a name refers to.

    Args:
        name: `module:Class`, `package.module:function`, `file.py:Class`, `file.py` with one environment, or the URL of
            an OpenEnv server.

    Raises:
        SystemExit: if the object does not exist or cannot be imported.
    """
    if name.startswith(("http://", "https://")):
        from .adapters.openenv import RemoteEnvironment

        return partial(RemoteEnvironment, [name])
    try:
        module, _, attribute = resolve_environment_name(name).rpartition(":")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if not module:
        raise SystemExit(f"{name!r} is not the name of an environment: write module:Class, e.g. my_game:MyEnvironment")
    try:
        return getattr(import_named(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} cannot be loaded: {error}") from error


def import_named(module: str) -> ModuleType:
    """Return the module of a file, `file.py`, or the one of that name."""
    if module.endswith(".py"):
        return import_file(module)
    sys.path.insert(0, os.getcwd())  # not "": workers get this path, and may run in another folder
    return importlib.import_module(module)


def resolve_environment_name(name: str) -> str:
    """Return the full name of an environment: `/folder/file.py:Class` for `file.py` with one environment.

    The file is parsed, not imported. Other names are returned unchanged.

    Raises:
        ValueError: if the file cannot be read, lacks the class, or contains no environment or several.
    """
    return _resolve(name, find_environments, "Class", "contains no TextEnvironment")


def resolve_agent_name(name: str) -> str:
    """Return the full name of an agent: `/folder/file.py:NAME` for `file.py` with one agent.

    The file is parsed, not imported. Other names are returned unchanged.

    Raises:
        ValueError: if the file cannot be read, lacks the name, or contains no agent or several.
    """
    if name.startswith(("http:", "https:")) or not (":" in name or name.endswith(".py")):
        raise ValueError(f"agent is {name!r}: write FILE.py, or FILE.py:NAME, with a function (task, client)")
    return _resolve(name, find_agents, "NAME", "contains no public function (task, client) and no AgentCommand")


def _resolve(name: str, find: Callable[[ast.Module], list[str]], kind: str, nothing: str) -> str:
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    if not path.endswith(".py") or path.startswith(("http:", "https:")):
        return name
    if not Path(path).is_file():
        raise ValueError(f"{name!r} cannot be loaded: there is no file {path!r} in {os.getcwd()!r}")
    tree = read_source(path)
    found = find(tree)
    if attribute and not binds(tree, attribute):
        raise ValueError(f"{path} has no {attribute}{': it contains ' if found else ''}{', '.join(found)}")
    if not attribute and len(found) != 1:
        content = f"contains {', '.join(found)}" if found else nothing
        raise ValueError(f"{path} {content}: write {path}:{found[0] if found else kind}")
    return f"{Path(path).resolve()}:{attribute or found[0]}"


def binds(tree: ast.Module, name: str) -> bool:
    """Return whether the file defines or imports the name; a star import counts."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if any(alias.name == "*" or (alias.asname or alias.name) == name for alias in node.names):
                return True
    return False


def read_source(path: str | Path) -> ast.Module:
    """Return the syntax tree of a file. Raises `ValueError` if the file cannot be read or parsed."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"{path} cannot be read{at}: {getattr(error, 'msg', error)}") from error


def find_environments(tree: ast.Module) -> list[str]:
    """Return the names of a file's public environment classes.

    A class is an environment if it derives from `TextEnvironment`, directly or through another class of the file, or
    is in TRL's style, with `reset` and `get_reward`.
    """
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    environments: set[str] = set()
    found = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
        bases = [imported.get(base, base) for base in bases]
        methods = {part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))}
        if any(base in environments or _is_environment(base) for base in bases) or {"reset", "get_reward"} <= methods:
            environments.add(node.name)
            found += [] if node.name.startswith("_") else [node.name]
    return found


def _is_environment(base: str) -> bool:
    """Return whether a base class is an environment, by its name alone."""
    bundled = base.startswith(("g2po_trl.", "g2po_envs."))
    return "TextEnvironment" in base or (bundled and base.endswith("Environment"))


def find_agents(tree: ast.Module) -> list[str]:
    """Return the names of a file's public agents: functions `(task, client)` and `AgentCommand`s."""
    found = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [*node.args.posonlyargs, *node.args.args]
            names = [node.name] if [one.arg for one in parameters[:2]] == ["task", "client"] else []
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            call = getattr(node, "value", None)
            made = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
            names = [one.id for one in targets if isinstance(one, ast.Name)] if made == "AgentCommand" else []
        found += [name for name in names if not name.startswith("_")]
    return found
