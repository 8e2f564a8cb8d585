"""Load environments and other objects by name, as given on a command line or in run.json."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..prompts.template import PromptTemplate
from ..utils.errors import G2POError
from .file_modules import import_file


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
    if not module or module.startswith("."):
        raise G2POError(f"{name!r} is not the name of an environment: write module:Class or file.py:Class")
    try:
        return getattr(import_named(module), attribute)
    except (ImportError, AttributeError) as error:
        raise G2POError(f"{name!r} cannot be loaded: {error}") from error


def load_template(name: str) -> PromptTemplate:
    """Return the prompt template of a name, as for `load`."""
    wanted = f"prompt is {name!r}: write module:TEMPLATE or file.py:TEMPLATE, the name of a PromptTemplate"
    if ":" not in str(name):
        raise G2POError(wanted)
    template = load(name)
    if not isinstance(template, PromptTemplate):
        raise G2POError(f"{wanted}; this is a {type(template).__name__}")
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


def resolve_environment_name(name: str) -> str:
    """Return the full name of an environment: `/folder/file.py:Class` for `file.py` with one environment.

    The file is parsed, not imported: it may be a script. Other names are returned unchanged.

    Raises:
        G2POError: if the file cannot be read, lacks the class, or contains no environment or several.
    """
    return _resolve(name, find_environments, "Class", "contains no TextEnvironment")


def resolve_agent_name(name: str) -> str:
    """Return the full name of an agent, as `resolve_environment_name` does of an environment."""
    if name.startswith(("http:", "https:")) or not (":" in name or name.endswith(".py")):
        raise G2POError(f"agent is {name!r}: write FILE.py, or FILE.py:NAME, with a function (task, client)")
    return _resolve(name, find_agents, "NAME", "contains no public function (task, client) and no AgentCommand")


def _resolve(name: str, find: Callable[[ast.Module], list[str]], kind: str, nothing: str) -> str:
    path, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    if not path.endswith(".py") or path.startswith(("http:", "https:")):
        return name
    if not Path(path).is_file():
        raise G2POError(f"{name!r} cannot be loaded: there is no file {path!r} in {os.getcwd()!r}")
    tree = read_source(path)
    found = find(tree)
    if attribute and not binds(tree, attribute):
        raise G2POError(f"{path} has no {attribute}{': it contains ' if found else ''}{', '.join(found)}")
    if not attribute and len(found) != 1:
        content = f"contains {', '.join(found)}" if found else nothing
        raise G2POError(f"{path} {content}: write {path}:{found[0] if found else kind}")
    return f"{Path(path).resolve()}:{attribute or found[0]}"


def read_source(path: str | Path) -> ast.Module:
    """Return the syntax tree of a file. Raises `G2POError` if the file cannot be read or parsed."""
    try:
        return ast.parse(Path(path).read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise G2POError(f"{path} cannot be read{at}: {getattr(error, 'msg', error)}") from error


def binds(tree: ast.Module, name: str) -> bool:
    """Return whether the file defines or imports the name; a star import counts."""
    found = {getattr(node, "asname", None) or getattr(node, "name", None) for node in ast.walk(tree)}
    found |= {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return name in found or "*" in found


def names_a_dictionary(name: str) -> bool:
    """Return whether `file.py:NAME` names a variable with a literal dictionary. The file is parsed, not imported."""
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        return False
    for node in read_source(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(getattr(node, "value", None), ast.Dict):
            if any(isinstance(one, ast.Name) and one.id == attribute for one in targets):
                return True
    return False


def find_environments(tree: ast.Module) -> list[str]:
    """Return the names of a file's public environment classes.

    A class is an environment if it derives from `TextEnvironment`, directly or through another class of the file, or
    is in TRL's style, with `reset` and `get_reward`.
    """
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {
        one.asname or one.name: f"{node.module}.{one.name}" if isinstance(node, ast.ImportFrom) else one.name
        for node in imports
        for one in node.names
    }
    environments = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
            methods = {getattr(part, "name", None) for part in node.body}
            if {"reset", "get_reward"} <= methods or any(
                base in environments or _is_environment(base, imported) for base in bases
            ):
                environments.append(node.name)
    return [name for name in environments if not name.startswith("_")]


def _is_environment(base: str, imported: Mapping[str, str]) -> bool:
    """Return whether a base class is an environment, only by its name and that of its module."""
    module, dot, name = base.partition(".")
    base = imported.get(module, module) + dot + name
    bundled = base.startswith(("g2po_trl.", "g2po_envs."))
    return "TextEnvironment" in base or (bundled and base.endswith("Environment"))


def find_agents(tree: ast.Module) -> list[str]:
    """Return the names of a file's public agents: functions `(task, client)` and `AgentCommand`s."""
    found = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            found += [node.name] if parameters[:2] == ["task", "client"] else []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_agent = ast.unparse(node.value.func).rpartition(".")[2] == "AgentCommand"
            found += [one.id for one in targets if is_agent and isinstance(one, ast.Name)]
    return [name for name in found if not name.startswith("_")]
