"""Command line: the commands of `g2po`, and how they report errors.

`main` imports a command's code when the command is called.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..utils.errors import G2POError
from ..utils.show import printable
from .process import set_up_process

# Title -> command -> description. The code of a command is `main(argv)` in g2po_trl.cli.commands.NAME.
GROUPS = {
    "Prepare": {
        "init": "write a folder with a small environment or agent to start from",
        "check": "play random episodes of an environment or agent, report problems",
        "play": "play an environment yourself, in the terminal",
        "estimate": "estimate the memory and tokens of a training, or time it",
    },
    "Train": {
        "teach": "fine-tune a model on an expert's actions, as a start for training",
        "train": "train on alfworld, sokoban, textworld, … or your own environment",
    },
    "Inspect": {
        "view": "view a run or an evaluation, or compare several",
        "report": "summarise a run and test its state keys",
        "evaluate": "evaluate a checkpoint, an adapter or a served model",
    },
    "Connect": {
        "credit": "compute the advantages of the calls in an agent's logs",
        "serve": "serve an environment over OpenEnv",
    },
    "About": {
        "env": "print the versions and GPUs of this machine, for bug reports",
        "version": "print the version of g2po-trl",
    },
}
COMMANDS = [name for group in GROUPS.values() for name in group]
_LINES = [[title, *(f"  {name:9} {text}" for name, text in group.items()), ""] for title, group in GROUPS.items()]
HELP = "\n".join(
    [
        "usage: g2po COMMAND [ARGUMENTS]\n\nTrain language-model agents by G2PO, on top of TRL.\n",
        *sum(_LINES, []),
        "Examples",
        "  g2po train alfworld                             a tiny model on small games, on the CPU",
        "  g2po init my_game && cd my_game && g2po train   an environment of your own",
        "  g2po view runs/alfworld-tiny                    its episodes and advantages",
        "  g2po evaluate --model runs/alfworld-tiny --seeds 3",
        "",
        "g2po COMMAND --help prints a command's arguments; --debug with any command, the traceback of an error.\n",
    ]
)
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
    set_up_process()
    if name in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if name in ("--version", "version"):
        print(f"g2po-trl {_version()}")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.lower(), COMMANDS, 1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        _fail("g2po", f"{name!r} is not a command: {remedy}", code=2)
    try:
        import_module(f"g2po_trl.cli.commands.{name}").main(rest)
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

    if isinstance(error, G2POError):
        return str(error)
    if isinstance(error, ImportError) and (text := missing_extra(error)):
        return text
    if isinstance(error, OSError) and (text := _describe_os_error(error)):
        return text
    _remove_old_tracebacks()
    with tempfile.NamedTemporaryFile("w", prefix=_PREFIX, suffix=".txt", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {error}\nThe traceback is in {file.name}; --debug prints it."


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
