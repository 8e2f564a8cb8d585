"""Optional dependencies and the commands that install them. Standard library only."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import requires
from pathlib import Path

# Modules that the package of an extra brings along.
_BROUGHT_BY = {"textworld": "alfworld", "uvicorn": "openenv", "websockets": "openenv"}


@cache
def extra_of(module: str) -> str | None:
    """Return the extra that installs a module, from the metadata of g2po-trl; `None` if there is none."""
    package = _BROUGHT_BY.get(module, module)
    for requirement in requires("g2po-trl") or ():
        found = re.match(r"""([\w.-]+).*\bextra == ["']([\w-]+)["']""", requirement)
        if found and found[1] == package and found[2] != "dev":
            return found[2]
    return None


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the clone if the package is imported from one."""
    clone = Path(__file__).resolve().parents[2]
    if (clone / "setup.cfg").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    return f"pip install 'g2po-trl[{extra}]'"


def missing_extra(error: ImportError) -> str | None:
    """Return how to install the module that an import failed on; `None` if no extra contains it."""
    module = (error.name or "").partition(".")[0]
    if "vLLM is not available" in str(error):  # TRL names its own extra
        module = "vllm"
    extra = extra_of(module)
    return extra and f"{module} is not installed: {install_command(extra)}"
