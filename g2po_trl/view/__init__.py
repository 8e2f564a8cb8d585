"""Viewer: an HTML page with curves, state graphs, advantages and evaluations of a run, or of two side by side."""

from importlib import import_module
from typing import Any

_MODULE_OF = {"Evaluation": "episode_sets", "Run": "data"}
_MODULE_OF |= {"InlinePage": "page", "write_page": "page", "Sources": "sources", "open_folder": "sources"}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:  # `words` is read where neither torch nor a server is installed
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
