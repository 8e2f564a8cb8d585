"""Optional dependencies and the commands that install them. Standard library only."""

from __future__ import annotations

from pathlib import Path

# Module -> the extra of setup.cfg that installs it.
MODULE_EXTRAS = {
    "alfworld": "alfworld",
    "textworld": "alfworld",
    "regex": "webshop",
    "snowballstemmer": "webshop",
    "textblob": "webshop",
    "thefuzz": "webshop",
    "openenv": "openenv",
    "uvicorn": "openenv",
    "websockets": "openenv",
    "openai": "agents",
    "bitsandbytes": "qlora",
    "gguf": "pretrained",
    "vllm": "vllm",
    "datasketch": "similarity",
    "matplotlib": "plots",
    "pyvis": "view",
    "gymnasium": "gymnasium",
    "textarena": "textarena",
}


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
    if module not in MODULE_EXTRAS:
        return None
    return f"{module} is not installed: {install_command(MODULE_EXTRAS[module])}"
