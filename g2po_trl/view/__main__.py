"""Look at a run.

    g2po view RUN                        # writes RUN/view.html and opens it
    g2po view RUN --serve                # serves it on loopback; reads what is looked at

RUN is the `output_dir` of a training run. The page holds all iterations, prompts too while they are few; of a run with
more than 100 use `--serve`, or choose some with `--iterations`.
"""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from .data import Run
from .page import write_page
from .server import make_server

MANY = 100


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="g2po view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="the page; default: RUN/view.html")
    parser.add_argument("--iterations", type=int, nargs="+", help="put these in; default: all")
    parser.add_argument("--no-prompts", action="store_true", help="leave the prompts' texts out")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--serve", action="store_true", help="serve it on 127.0.0.1 instead")
    parser.add_argument("--port", type=int, default=0, help="of --serve; default: a free one")
    args = parser.parse_args(argv)
    try:
        run = Run(args.run)
        missing = set(args.iterations or ()) - set(run.numbers)
        if missing:
            raise ValueError(f"iterations {sorted(missing)} are not there; there are {run.numbers}")
        if args.serve:
            try:
                server = make_server(run, args.port)
            except (OSError, OverflowError) as error:
                raise ValueError(f"port {args.port} cannot be used ({error}): pass another --port, or none") from error
            address = f"http://127.0.0.1:{server.server_port}/"
            print(f"{args.run} is at {address} until Ctrl-C", flush=True)
            if not args.no_open:
                webbrowser.open(address)
            server.serve_forever()
        chosen = args.iterations or run.numbers
        page = write_page(
            run, args.output or args.run / "view.html", chosen, not args.no_prompts and len(chosen) <= MANY
        )
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        return
    print(f"{page} ({page.stat().st_size / 2**20:.1f} MB)")
    if not args.no_open:
        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
