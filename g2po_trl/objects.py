"""Objects by their names, as a command line or a run's description has them."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """`module:Class`, `package.module:function`, `file.py:Class`, or the address of an OpenEnv server.

    Raises:
        SystemExit: when there is no such thing.
    """
    if name.startswith(("http://", "https://")):
        from .openenv import RemoteEnvironment

        return partial(RemoteEnvironment, [name])
    module, _, attribute = name.partition(":")
    if not attribute and not name.endswith(".py"):
        raise SystemExit(f"{name!r} names no environment: write module:Class, e.g. my_game:MyEnvironment")
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise SystemExit(f"{name!r} cannot be loaded: there is no file {module!r} in {os.getcwd()!r}")
        sys.path.insert(0, str(Path(module).resolve().parent))
        module = Path(module).stem
    else:
        sys.path.insert(0, os.getcwd())  # and not "": workers get this path, and may have another folder by then
    try:
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else _only_environment(name, loaded)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} cannot be loaded: {error}") from error


def _only_environment(file: str, module: Any) -> type:
    from .environments.contract import TextEnvironment

    found = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, TextEnvironment) and one.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = f"holds {', '.join(one.__name__ for one in found)}" if found else "holds no TextEnvironment"
        raise SystemExit(f"{file} {names}: write {file}:Class")
    return found[0]
