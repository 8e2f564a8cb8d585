"""Objects by their names, as a command line or a run's description has them."""

from __future__ import annotations

import importlib
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
    if not attribute:
        raise SystemExit(f"{name!r} names no environment: write module:Class, e.g. my_game:MyEnvironment")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        module = Path(module).stem
    else:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} cannot be loaded: {error}") from error
