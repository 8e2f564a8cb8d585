"""One HTML file with all of a run in it: no server, no network, no second file."""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..installing import how_to_install
from ..json_text import to_json
from .data import Run

_STATIC = Path(__file__).parent / "static"


def library() -> str:
    """The source of vis-network, the graph library; it comes with the package pyvis.

    Raises:
        ImportError: without pyvis.
    """
    found = find_spec("pyvis")
    paths = sorted(Path(found.origin).parent.glob("lib/vis-*/vis-network.min.js")) if found else []
    if not paths:
        raise ImportError(f"the viewer draws graphs by vis-network, which comes with pyvis: {how_to_install('view')}")
    return paths[-1].read_text(encoding="utf-8")


def shell(data: str = "") -> str:
    """The page with `data` blocks; without any it asks its server."""
    parts = {
        "/*CSS*/": (_STATIC / "page.css").read_text(encoding="utf-8"),
        "<!--DATA-->": data,
        "/*LIBRARY*/": library().replace("</script", "<\\/script"),
        "/*JS*/": (_STATIC / "page.js").read_text(encoding="utf-8"),
    }
    page = (_STATIC / "page.html").read_text(encoding="utf-8")
    for mark, content in parts.items():
        page = page.replace(mark, content)
    return page


def page_of(run: Run, iterations: Sequence[int] | None = None, prompts: bool = True) -> str:
    """The page as text; arguments as in `write_page`."""
    chosen = list(run.numbers if iterations is None else iterations)
    blocks = [_block("overview", {**run.overview(), "iterations": chosen})]
    blocks += [_block(f"iteration-{number}", run.iteration(number, prompts)) for number in chosen]
    return shell("\n".join(blocks))


class InlinePage:
    """The page inside a notebook: the last expression of a cell.

    Args:
        run: a run's folder. iterations: `None`: the last one. height: pixels.
    """

    def __init__(self, run: str | Path, iterations: Sequence[int] | None = None, height: int = 900):
        read = Run(run)
        self.page, self.height = page_of(read, iterations or read.numbers[-1:]), height

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" width="100%" height="{self.height}" style="border:0"></iframe>'
        )


def write_page(run: Run, path: str | Path, iterations: Sequence[int] | None = None, prompts: bool = True) -> Path:
    """Write the page.

    Args:
        iterations: to be put in; `None`: all.
        prompts: with the text of every prompt.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_of(run, iterations, prompts), encoding="utf-8")
    return path


def _block(name: str, data: Any) -> str:
    packed = gzip.compress(to_json(data).encode(), 6, mtime=0)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>'
