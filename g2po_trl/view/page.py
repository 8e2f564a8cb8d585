"""The viewer's page: a self-contained HTML file with the data of a run or of two."""

from __future__ import annotations

import base64
import gzip
import html
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..utils.extras import install_command
from ..utils.json import atomic_write, to_json
from ..utils.masking import masked
from .data import Run
from .episode_sets import Evaluation
from .sources import Sources, open_folder

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("base", "grid", "place", "curves", "graph", "training", "panel", "results", "episodes", "live", "start")


def library() -> str:
    """Return the source of vis-network, the graph library, from the package pyvis.

    Raises:
        ImportError: if pyvis is not installed.
    """
    found = find_spec("pyvis")
    paths = sorted(Path(found.origin).parent.glob("lib/vis-*/vis-network.min.js")) if found else []
    if not paths:
        raise ImportError(f"the viewer draws graphs by vis-network, which comes with pyvis: {install_command('view')}")
    return paths[-1].read_text(encoding="utf-8")


def shell(sources: Sources, data: str = "") -> str:
    """Return the page with blocks of data; without any, the page requests data from its server."""
    scripts = "\n".join((_STATIC / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    parts = {
        "/*CSS*/": (_STATIC / "page.css").read_text(encoding="utf-8"),
        "<!--DATA-->": data,
        "/*LIBRARY*/": library().replace("</script", "<\\/script") if sources.run else "",  # it draws graphs
        "/*JS*/": scripts,
    }
    page = (_STATIC / "page.html").read_text(encoding="utf-8")
    for mark, content in parts.items():
        page = page.replace(mark, content)
    return page


def page_of(
    sources: Sources, iterations: Sequence[int] | None = None, prompts: bool = True, public: bool = False
) -> str:
    """Return the page as text; arguments as in `write_page`."""
    chosen = list(sources.numbers if iterations is None else iterations)
    overview = sources.overview()
    if overview["training"]:
        overview["training"]["iterations"] = chosen
    blocks = [_block("overview", overview, public)]
    blocks += [_block(f"iteration-{number}", sources.run.iteration(number, prompts), public) for number in chosen]
    blocks += [_block(f"set-{name}", one.data(prompts), public) for name, one in sources.sets().items()]
    return shell(sources, "\n".join(blocks))


class InlinePage:
    """The viewer's page in a notebook: make it the last expression of a cell.

    Args:
        folder: of a training run or an evaluation.
        iterations: iterations of a training run to include. `None`: the last one.
        height: in pixels.
        other: a second folder, to compare with the first.
    """

    def __init__(
        self,
        folder: str | Path,
        iterations: Sequence[int] | None = None,
        height: int = 900,
        other: str | Path | None = None,
    ):
        sources = Sources(*(open_folder(path) for path in (folder, other) if path is not None))
        self.page, self.height = page_of(sources, iterations or sources.numbers[-1:]), height

    def _repr_html_(self) -> str:
        # Without `allow-same-origin`: a script in the page has no part in the notebook and its server.
        attributes = f'sandbox="allow-scripts" width="100%" height="{self.height}" style="border:0"'
        return f'<iframe srcdoc="{html.escape(self.page)}" {attributes}></iframe>'


def write_page(
    sources: Run | Evaluation | Sources,
    path: str | Path,
    iterations: Sequence[int] | None = None,
    prompts: bool = True,
    public: bool = False,
) -> Path:
    """Write the viewer's page of some iterations (`None`: all), with every prompt if `prompts`; return its path.

    `public`: without texts that look like secrets, and with `~` for the home folder. Raises `ImportError` if pyvis,
    which brings the graph library, is not installed.
    """
    path = Path(path)
    sources = sources if isinstance(sources, Sources) else Sources(sources)
    page = page_of(sources, iterations, prompts, public)
    with atomic_write(path) as file:
        file.write(page)
    return path


def _block(name: str, data: Any, public: bool) -> str:
    text = to_json(masked(data) if public else data)
    if public and len(home := os.path.expanduser("~")) > 1:
        text = text.replace(home, "~")
    packed = gzip.compress(text.encode(), 6, mtime=0)
    return f'<script type="text/plain" id="{html.escape(name)}">{base64.b64encode(packed).decode()}</script>'
