"""Command line: the commands of `g2po`, and how they report errors.

It may import everything, and imports a command's code when the command is called. It gives `main`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

# Name -> module with `main(argv)`, and what it is for.
COMMANDS = {
    "init": ("g2po_trl.cli.init", "write a folder with a small environment of your own to start from"),
    "check": ("g2po_trl.check", "play an environment at random and report what is wrong with it"),
    "train": ("g2po_trl.cli.train", "train on alfworld, webshop, appworld or an environment of your own"),
    "teach": ("g2po_trl.cli.teach", "teach a model the reply's format, as a start for training"),
    "view": ("g2po_trl.view.__main__", "look at a run or an evaluation, or compare two"),
    "evaluate": ("g2po_trl.cli.evaluate", "evaluate a checkpoint, an adapter or a served model"),
    "report": ("g2po_trl.report.__main__", "analyse a run's state graphs, with plots"),
    "serve": ("g2po_trl.openenv", "serve an environment by OpenEnv"),
    "completion": ("g2po_trl.cli.completion", "print the shell completion for bash or zsh"),
}
_LINES = "\n".join(f"  {name:11} {text}" for name, (_, text) in COMMANDS.items())
HELP = f"""usage: g2po COMMAND [ARGUMENTS]

Train language-model agents by G2PO, on top of TRL.

{_LINES}

  g2po COMMAND --help    what a command takes
  g2po --version
  --debug                with any command: the traceback of an error
"""
_DEBUG_VALUES = ("underflow_overflow", "tpu_metrics_debug")  # of transformers' own --debug


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Raises:
        SystemExit: 1 after an error, 2 for arguments that make no sense, 130 after Ctrl-C, else as the command says.
    """
    argv, debug = _without_debug(list(sys.argv[1:] if argv is None else argv))
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if name == "--version":
        print(f"g2po-trl {_version()}")
        return
    if name not in COMMANDS:
        _fail("g2po", f"{name!r} is not a command: choose one of {', '.join(COMMANDS)}", code=2)
    try:
        import_module(COMMANDS[name][0]).main(rest)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\ng2po {name}: stopped", file=sys.stderr)
        sys.exit(130)
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            raise
        if debug:
            traceback.print_exception(exit_.__cause__ or exit_)
        _fail(f"g2po {name}", str(exit_.code))
    except Exception as error:
        if debug:
            raise
        _fail(f"g2po {name}", _in_words(error))


def _without_debug(argv: list[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, unless it is transformers' option of this name, which has a value."""
    for at, word in enumerate(argv):
        if word == "--debug" and (argv[at + 1 : at + 2] or [""])[0] not in _DEBUG_VALUES:
            return argv[:at] + argv[at + 1 :], True
    return argv, False


def _in_words(error: Exception) -> str:
    """An error nobody foresaw: what it says, and where its traceback is kept."""
    from ..installing import missing_module

    if isinstance(error, ImportError) and (said := missing_module(error)):
        return said
    with tempfile.NamedTemporaryFile("w", prefix="g2po-error-", suffix=".txt", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error}\nThe traceback is in {file.name}; --debug prints it."


def _fail(who: str, message: str, code: int = 1) -> None:
    rank = os.environ.get("RANK")
    print(f"{who}: error: {f'(rank {rank}) ' if rank else ''}{message}", file=sys.stderr)
    sys.exit(code)


def _version() -> str:
    try:
        return version("g2po-trl")
    except PackageNotFoundError:
        return "(not installed)"
