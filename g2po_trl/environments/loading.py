"""Objects by their names, as a command line or a run's description has them."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """`module:Class`, `package.module:function`, `file.py:Class`, `file.py` with one environment, or the address of
    an OpenEnv server.

    Raises:
        SystemExit: when there is no such thing.
    """
    if name.startswith(("http://", "https://")):
        from .adapters.openenv import RemoteEnvironment

        return partial(RemoteEnvironment, [name])
    try:
        module, _, attribute = environment_name(name).rpartition(":")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if not module:
        raise SystemExit(f"{name!r} names no environment: write module:Class, e.g. my_game:MyEnvironment")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        module = Path(module).stem
    else:
        sys.path.insert(0, os.getcwd())  # and not "": workers get this path, and may have another folder by then
    try:
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} cannot be loaded: {error}") from error


def environment_name(name: str) -> str:
    """Complete the name of an environment: `file.py` to `/folder/file.py:Class`, its one environment.

    All commands that take an environment read its name by this. The source is looked at, and nothing is imported. Any
    other name is returned as it is.

    Raises:
        ValueError: when the file cannot be read, has no such class, or holds no environment or several.
    """
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    if not path.endswith(".py") or path.startswith(("http:", "https:")):
        return name
    if not Path(path).is_file():
        raise ValueError(f"{name!r} cannot be loaded: there is no file {path!r} in {os.getcwd()!r}")
    tree = read_source(path)
    found = environments_in(tree)
    if attribute and not _binds(tree, attribute):
        raise ValueError(f"{path} has no {attribute}{': it holds ' if found else ''}{', '.join(found)}")
    if not attribute and len(found) != 1:
        holds = f"holds {', '.join(found)}" if found else "holds no TextEnvironment"
        raise ValueError(f"{path} {holds}: write {path}:{found[0] if found else 'Class'}")
    return f"{Path(path).resolve()}:{attribute or found[0]}"


def _binds(tree: ast.Module, name: str) -> bool:
    """Is the name given to anything in this file? A star may bring it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if any(alias.name == "*" or (alias.asname or alias.name) == name for alias in node.names):
                return True
    return False


def read_source(path: str | Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        ValueError: when it cannot be read.
    """
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"{path} cannot be read{at}: {getattr(error, 'msg', error)}") from error


def environments_in(tree: ast.Module) -> list[str]:
    """The classes of a file that are environments: derived from `TextEnvironment`, also by way of another class of
    the file, or in TRL's style, with `reset` and `get_reward`. A leading underscore hides a class.
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
        methods = {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
        if any(base in environments or _is_environment(base) for base in bases) or {"reset", "get_reward"} <= methods:
            environments.add(node.name)
            found += [] if node.name.startswith("_") else [node.name]
    return found


def _is_environment(base: str) -> bool:
    """A class of g2po_trl's or of another file, by its name."""
    ours = base.startswith(("g2po_trl.", "g2po_envs."))
    return "TextEnvironment" in base or (ours and base.endswith("Environment"))
