"""How to install what an optional part needs, said in one place. Standard library only."""

from __future__ import annotations

from pathlib import Path

# Module -> the extra of setup.cfg that brings it.
EXTRA_OF = {
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


def how_to_install(extra: str) -> str:
    """The command that installs an extra: from the clone that this package is imported from, or by its name."""
    clone = Path(__file__).resolve().parents[2]
    if (clone / "setup.cfg").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    return f"pip install 'g2po-trl[{extra}]'"


def missing_module(error: ImportError) -> str | None:
    """A sentence about a module that an extra brings; `None` for any other."""
    module = (error.name or "").partition(".")[0]
    if "vLLM is not available" in str(error):  # TRL names its own extra
        module = "vllm"
    if module not in EXTRA_OF:
        return None
    return f"{module} is not installed: {how_to_install(EXTRA_OF[module])}"
