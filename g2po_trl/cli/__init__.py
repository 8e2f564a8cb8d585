"""Command line: the commands of `g2po`, and how they report errors.

`main` imports a command's code when the command is called.
"""

from __future__ import annotations

import contextlib
import errno
import linecache
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..utils.show import printable
from .process import set_up_process

# Name -> module with `main(argv)`, and description.
COMMANDS = {
    "init": ("g2po_trl.cli.commands.init", "write a folder with a small environment or agent to start from"),
    "check": ("g2po_trl.cli.commands.check", "play random episodes of an environment or agent, report problems"),
    "play": ("g2po_trl.cli.commands.play", "play an environment yourself, in the terminal"),
    "train": ("g2po_trl.cli.commands.train", "train on alfworld, sokoban, textworld, … or your own environment"),
    "teach": ("g2po_trl.cli.commands.teach", "fine-tune a model on an expert's actions, as a start for training"),
    "estimate": ("g2po_trl.cli.commands.estimate", "estimate the memory, time and cost of a training"),
    "view": ("g2po_trl.cli.commands.view", "view a run or an evaluation, or compare several"),
    "evaluate": ("g2po_trl.cli.commands.evaluate", "evaluate a checkpoint, an adapter or a served model"),
    "report": ("g2po_trl.cli.commands.report", "summarise a run and test its state keys"),
    "credit": ("g2po_trl.cli.commands.credit", "compute the advantages of the calls in an agent's logs"),
    "serve": ("g2po_trl.cli.commands.serve", "serve an environment over OpenEnv"),
}
_LINES = "\n".join(f"  {name:11} {text}" for name, (_, text) in COMMANDS.items())
HELP = f"""usage: g2po COMMAND [ARGUMENTS]

Train language-model agents by G2PO, on top of TRL.

{_LINES}

  g2po COMMAND --help    arguments of a command
  g2po --version
  --debug                with any command: print the traceback of an error
"""
_PREFIX = "g2po-error-"
_DEBUG_VALUES = ("underflow_overflow", "tpu_metrics_debug")  # of transformers' own --debug


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        argv: command and arguments. Default: the command line.

    Raises:
        SystemExit: 1 after an error, 2 for invalid arguments, 130 after Ctrl-C, else the command's exit code.
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
    set_up_process()
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
        _fail(f"g2po {name}", _describe(error))


def _without_debug(argv: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without `--debug`, and whether it was there; transformers' `--debug VALUE` stays."""
    for at, word in enumerate(argv):
        if word == "--debug" and (argv[at + 1 : at + 2] or [""])[0] not in _DEBUG_VALUES:
            return argv[:at] + argv[at + 1 :], True
    return argv, False


def _describe(error: Exception) -> str:
    """Return the text to print; the traceback of an unexpected error is written to a file, which the text names."""
    from ..utils.extras import missing_extra

    if isinstance(error, ImportError) and (text := missing_extra(error)):
        return text
    if isinstance(error, OSError) and (text := _describe_os_error(error)):
        return text
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    if _is_expected(error):
        return str(error) if isinstance(error, (ValueError, RuntimeError, TypeError)) else f"{kind}{error}"
    _remove_old_tracebacks()
    with tempfile.NamedTemporaryFile("w", prefix=_PREFIX, suffix=".txt", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return f"{kind}{error}\nThe traceback is in {file.name}; --debug prints it."


def _is_expected(error: Exception) -> bool:
    """Return whether a `raise` statement of g2po-trl raised the error, so that its text is meant for the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    ours = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("g2po_trl", "g2po_envs", "g2po_recipes")
    return ours and linecache.getline(file, trace.tb_lineno).lstrip().startswith("raise ")


def _describe_os_error(error: OSError) -> str | None:
    """Return the text about a full disk, a folder that cannot be written, or a missing model; else `None`."""
    what = error.filename or "the output"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {what} cannot be written ({error.strerror}). What is complete stays: free some space, "
            "and the same command continues with --resume_from_checkpoint auto"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
        return f"{what} cannot be opened or written ({error.strerror}): choose another folder"
    text = str(error)
    if any(words in text for words in ("couldn't connect to", "is not a valid model identifier", "Can't load ")):
        first = text.strip().splitlines()[0]
        return f"the model is neither a folder nor available from the Hub: {first} Without network: --model FOLDER"
    return None


def _remove_old_tracebacks() -> None:
    """Remove tracebacks older than a week."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.txt"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 7 * 24 * 3600:
                path.unlink()


def _fail(command: str, message: str, code: int = 1) -> None:
    rank = os.environ.get("RANK")
    print(f"{command}: error: {f'(rank {rank}) ' if rank else ''}{printable(message)}", file=sys.stderr)
    sys.exit(code)


def _version() -> str:
    try:
        return version("g2po-trl")
    except PackageNotFoundError:
        return "(not installed)"
