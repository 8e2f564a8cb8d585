"""Look at a training run or an evaluation, or compare several.

    g2po view RUN                        # writes RUN/view.html and opens it
    g2po view EVALUATION                 # what `g2po evaluate` wrote to its --output
    g2po view RUN_A RUN_B …              # their success, and two evaluations side by side, task by task
    g2po view CREDIT                     # what `g2po credit` wrote of a log
    g2po view RUN --serve                # serves the page on this machine; it refreshes during the run
    g2po view RUN --text                 # in the terminal: success, groups, an episode
    g2po view RUN --push-space OWNER/NAME    # also as a static Space of the Hugging Face Hub, public if it is new

The page contains all iterations and evaluations, and the prompts if there are at most 100 iterations. For a longer run
use `--serve`, or choose iterations with `--iterations`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ...utils.parser import Parser
from ...view.page import write_page
from ...view.server import make_server
from ...view.sources import Sources, open_folder
from ...view.space import push_space
from ...view.terminal import TerminalView

MANY = 100


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="g2po view", description=__doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="one folder, or several to compare")
    where = "the page to write; default: view.html in the first folder, or view-beside-SECOND.html"
    add("--output", metavar="FILE", type=Path, help=where)
    add("--iterations", metavar="N", type=int, nargs="+", help="iterations of a training run to include; default: all")
    add("--no-prompts", action="store_true", help="leave out the texts of prompts")
    add("--no-open", action="store_true", help="do not open a browser")
    add("--serve", action="store_true", help="serve the page on 127.0.0.1 instead of writing it")
    add("--port", metavar="N", type=int, help="port of --serve; default: any free port")
    add("--push-space", metavar="OWNER/NAME", help="upload the page to this static Space of the Hugging Face Hub")
    add("--text", action="store_true", help="print to the terminal; --iterations N chooses one")
    episode = "with --text: group and episode, e.g. 3.2; default: a failed episode"
    add("--episode", metavar="G.E", type=_episode, help=episode)
    args = parser.parse_args(argv)
    if args.push_space and (args.text or args.serve):
        parser.error("--push-space uploads the page, which --text and --serve do not write: leave them out")
    if args.text and (args.output or args.no_prompts or args.serve):
        parser.error("--output, --no-prompts and --serve have no effect with --text: leave them out")
    if args.text and (len(args.folders) > 1 or len(args.iterations or ()) > 1):
        parser.error("--text shows one folder, and of a training run one iteration")
    if args.episode and not args.text:
        parser.error("--episode has no effect without --text: add it, or leave it out")
    if args.serve and (args.output or args.iterations or args.no_prompts):
        parser.error("--output, --iterations and --no-prompts have no effect with --serve: leave them out")
    if args.port is not None and not args.serve:
        parser.error("--port has no effect without --serve: add it, or leave it out")
    try:
        sources = Sources(*(open_folder(folder, live=args.serve) for folder in args.folders))
        if args.iterations and not sources.run:
            raise ValueError("--iterations chooses among a training run's: pass one training run, or leave it out")
        missing = set(args.iterations or ()) - set(sources.numbers)
        if missing:
            raise ValueError(f"iterations {sorted(missing)} are not there; there are {sources.numbers}")
        if args.serve:
            _serve(sources, args)
        if args.text:
            _print(sources, args)
            return
        chosen = args.iterations or sources.numbers
        path = args.output or args.folders[0] / _page_name(sources)
        try:
            prompts = not args.no_prompts and len(chosen) <= MANY
            page = write_page(sources, path, chosen, prompts, public=bool(args.push_space))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{path} cannot be written ({reason}): pass --output FILE, or --serve") from error
        print(f"{page} ({page.stat().st_size / 2**20:.1f} MB)", flush=True)
        if args.push_space:
            print(push_space(page, args.push_space))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        return
    if not (args.no_open or args.push_space):
        webbrowser.open(page.resolve().as_uri())


def _episode(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: write GROUP.EPISODE, e.g. 3.2")
    return int(found[1]), int(found[2])


def _print(sources: Sources, args: argparse.Namespace) -> None:
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    view = TerminalView(sources.sources[0], shutil.get_terminal_size().columns, colour)
    print(view.text(*(args.iterations or (None,)), args.episode))


def _serve(sources: Sources, args: argparse.Namespace) -> None:
    try:
        server = make_server(sources, args.port or 0)
    except (OSError, OverflowError) as error:
        raise ValueError(f"port {args.port} cannot be used ({error}): pass another --port, or none") from error
    names = ", ".join(str(folder) for folder in args.folders)
    print(f"{names}: {server.address} until Ctrl-C", flush=True)
    if not args.no_open:
        webbrowser.open(server.address)
    server.serve_forever()


def _page_name(sources: Sources) -> str:
    if len(sources.sources) == 1:
        return "view.html"
    return f"view-beside-{'-'.join(source.name for source in sources.sources[1:])}.html"
