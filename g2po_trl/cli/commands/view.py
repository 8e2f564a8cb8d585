"""Look at a training run or an evaluation, or compare several.

    g2po view RUN                        # writes RUN/view.html and opens it
    g2po view EVALUATION                 # what `g2po evaluate` wrote to its --output
    g2po view RUN_A RUN_B …              # their success, and two evaluations side by side, task by task
    g2po view CREDIT                     # what `g2po credit` wrote to its --output
    g2po view RUN --serve                # serves the page on this machine; it refreshes during the run
    g2po view RUN --text                 # in the terminal: success, groups, an episode
    g2po view RUN --push-space OWNER/NAME    # also as a static Space of the Hugging Face Hub, public if it is new

The page contains all iterations and evaluations. For a large run they are in a folder next to it, such as view-data,
which must stay there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...utils.errors import G2POError
from ...utils.options import Options, option, require
from ...view.page import data_folder, write_page
from ...view.server import Server
from ...view.sources import Sources, open_folder
from ...view.space import push_space
from ...view.terminal import TerminalView
from ..parser import parse


@dataclass
class ViewOptions(Options):
    folders: list[Path] = option("one folder, or several to compare", positional=True, metavar="FOLDER")
    output: Path | None = option("the page; default: view.html, or view-beside-SECOND.html", None, metavar="FILE")
    iterations: list[int] = option("iterations of a training run to include; default: all", [], needs="serve=False")
    prompts: bool = option("include the texts of prompts", True, needs="serve=False")
    open: bool = option("open the page in a browser", True, needs="serve=False")
    serve: bool = option("serve the page on 127.0.0.1 instead of writing it", False)
    port: int | None = option("port of --serve; default: any free port", None, within="[0, 65535]", needs="serve")
    push_space: str | None = option("upload it to this static Space of the Hub", None, metavar="OWNER/NAME")
    text: bool = option("print to the terminal; --iterations N chooses one", False, needs="serve=False")
    episode: str | None = option("e.g. 3.2, of group 3; default: a failed one", None, metavar="G.E", needs="text")

    def __post_init__(self):
        super().__post_init__()
        for name in ("output", "push_space"):
            is_used = not (getattr(self, name) and (self.text or self.serve))
            require(is_used, name, getattr(self, name), "it has no effect with --text and --serve, leave it out")
        shows_one = len(self.folders) == 1 and len(self.iterations) < 2
        require(shows_one or not self.text, "text", True, "pass one folder, and of a training run one iteration")
        is_place = self.episode is None or re.fullmatch(r"\d+\.\d+", self.episode)
        require(bool(is_place), "episode", self.episode, "write GROUP.EPISODE, e.g. 3.2")


def main(argv: Sequence[str] | None = None) -> None:
    args, _ = parse((ViewOptions,), argv, command="g2po view", description=__doc__)
    sources = Sources(*(open_folder(folder, live=args.serve) for folder in args.folders))
    missing = set(args.iterations) - set(sources.numbers)
    require(not missing, "iterations", sorted(missing), f"pass one training run, and of {sources.numbers}")
    if args.serve:
        try:
            server = Server(sources, args.port or 0)
        except OSError as error:
            raise G2POError(f"port {args.port} cannot be used ({error}): pass another", "port", args.port) from error
        print(f"{', '.join(map(str, args.folders))}: {server.address} until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    elif args.text:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        view = TerminalView(sources.sources[0], shutil.get_terminal_size().columns, colour)
        episode = tuple(map(int, args.episode.split("."))) if args.episode else None
        print(view.text(*(args.iterations or (None,)), episode))
    else:
        _write(sources, args)


def _write(sources: Sources, args: ViewOptions) -> None:
    others = "-".join(source.name for source in sources.sources[1:])
    path = args.output or args.folders[0] / (f"view-beside-{others}.html" if others else "view.html")
    page = write_page(sources, path, sorted({*args.iterations}) or None, args.prompts, bool(args.push_space))
    beside = sum(file.stat().st_size for file in data_folder(page).glob("*.js"))
    data = f", and {data_folder(page)} ({beside / 2**20:.1f} MB), which it loads" if beside else ""
    print(f"{page} ({page.stat().st_size / 2**20:.1f} MB){data}", flush=True)
    if args.push_space:
        print(push_space(page, args.push_space))
    elif args.open:
        webbrowser.open(page.resolve().as_uri())
