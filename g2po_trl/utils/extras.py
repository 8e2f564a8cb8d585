"""Optional dependencies and the commands that install them. Standard library only."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

_BROUGHT_BY = {"google": "google-genai", "textworld": "alfworld", "websockets": "openenv"}  # module -> package


@cache
def extra_of(module: str) -> str | None:
    """Return the extra that installs a module, from the metadata of g2po-trl; `None` if there is none."""
    package = re.escape(_BROUGHT_BY.get(module, module))
    pattern = rf"""{package}(?![\w.-]).*\bextra == ["'](?!dev["'])([\w-]+)"""
    found = [re.match(pattern, requirement) for requirement in requires("g2po-trl") or ()]
    return next((match[1] for match in found if match), None)


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the clone if the package is imported from one."""
    clone = Path(__file__).resolve().parents[2]
    is_clone = (clone / "setup.cfg").is_file()
    return f"pip install -e '{clone}[{extra}]'" if is_clone else f"pip install 'g2po-trl[{extra}]'"


def import_extra(module: str) -> ModuleType:
    """Return a module that an extra of the package installs. Raises `ImportError`, naming the extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(missing_extra(error) or str(error)) from error


def missing_extra(error: ImportError) -> str | None:
    """Return how to install the module that an import failed on; `None` if no extra contains it."""
    module = (error.name or "").partition(".")[0]
    return (extra := extra_of(module)) and f"{module} is not installed: {install_command(extra)}"
