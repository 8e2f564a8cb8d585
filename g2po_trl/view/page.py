"""The viewer's page: a self-contained HTML file with the data of a run or of two."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..utils.json import atomic_write, to_json
from ..utils.masking import masked
from .sources import Sources, open_folder

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = "base grid place curves graph training panel tasks results episodes live start".split()
LARGEST = 16 * 2**20  # characters of data in a page; of a larger run they are files beside it


def shell(data: str = "") -> str:
    """Return the page with blocks of data; without any, the page requests data from its server."""
    script = "\n".join((_STATIC / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    parts = {  # data last: they may contain what looks like a mark
        "/*CSS*/": (_STATIC / "page.css").read_text(encoding="utf-8"),
        "SCRIPT-DIGEST": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "/*JS*/": script,
        "<!--DATA-->": data,
    }
    page = (_STATIC / "page.html").read_text(encoding="utf-8")
    for mark, content in parts.items():
        page = page.replace(mark, content)
    return page


class InlinePage:
    """The viewer's page in a notebook: make it the last expression of a cell.

    Args:
        folder: folder of a training run or an evaluation.
        iterations: iterations of a training run to include. `None`: the last one.
        height: height in pixels.
    """

    def __init__(self, folder: str | Path, iterations: Sequence[int] | None = None, height: int = 900):
        sources = Sources(open_folder(folder))
        chosen = list(iterations or sources.numbers[-1:])
        blocks = [_block(name, _packed(read())) for name, read in sources.pieces(chosen).items()]
        self.page = shell("\n".join([_block("overview", _packed(sources.overview(chosen))), *blocks]))
        self.height = height

    def _repr_html_(self) -> str:
        # Without `allow-same-origin`: a script in the page has no part in the notebook and its server.
        attributes = f'sandbox="allow-scripts" width="100%" height="{self.height}" style="border:0"'
        return f'<iframe srcdoc="{html.escape(self.page)}" {attributes}></iframe>'


def write_page(
    sources: Sources,
    path: str | Path,
    iterations: Sequence[int] | None = None,
    prompts: bool = True,
    public: bool = False,
) -> Path:
    """Write the viewer's page of some iterations (`None`: all), with every prompt if `prompts`; return its path.

    The page is one file, but for data beyond `LARGEST` characters: they are written to files in a folder next to it,
    `data_folder`, which the page loads on demand. `public`: without texts that look like secrets, and with `~` for the
    home folder.
    """
    path, files, size = Path(path), {}, 0
    folder = data_folder(path)
    for old in folder.glob("*.js"):
        if old.stem.isdigit():
            old.unlink()
    blocks = [_block("overview", _packed(sources.overview(iterations), public))]
    for name, read in sources.pieces(iterations, prompts).items():
        packed = _packed(read(), public)
        size += len(packed)
        if size <= LARGEST:
            blocks.append(_block(name, packed))
            continue
        folder.mkdir(parents=True, exist_ok=True)
        files[name] = f"{len(files)}.js"
        (folder / files[name]).write_text(f'piece("{files[name]}", "{packed}");')
    if files:
        blocks.append(_block("files", _packed({"folder": folder.name, "of": files}, public)))
    with atomic_write(path) as file:
        file.write(shell("\n".join(blocks)))
    return path


def data_folder(page: Path) -> Path:
    """Return the folder of a page's data. It exists if the data are too large for the page."""
    return page.with_name(f"{page.stem}-data")


def _packed(data: Any, public: bool = False) -> str:
    text = to_json(masked(data) if public else data)
    if public and len(home := os.path.expanduser("~")) > 1:
        text = text.replace(home, "~")
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _block(name: str, packed: str) -> str:
    return f'<script type="text/plain" id="{html.escape(name)}">{packed}</script>'
