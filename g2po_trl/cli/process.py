"""Set up the process of a command or recipe, before it imports torch and TRL; print errors that its user can fix."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType

from ..utils.errors import G2POError
from ..utils.extras import missing_extra
from ..utils.show import outlive_readers, printable

_PATHS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}  # that a user chose


def set_up_process() -> None:
    """Keep known noise out of the output, and progress bars out of files.

    The process also continues if the reader of its output ends, prints question marks for characters that the terminal
    cannot show, and prints errors that the user can fix as one line.
    """
    sys.excepthook = _print_exception
    outlive_readers()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        warnings.filterwarnings("ignore", "IProgress not found")  # of notebooks without ipywidgets, for bars
    noise = "Failed to load CPU gemm_4bit_forward from kernels-community"  # at every start
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: not str(record.msg).startswith(noise))


def describe_error(error: BaseException) -> str | None:
    """Return the text about an error that the user can fix; `None` for any other, which is a bug."""
    if isinstance(error, G2POError) or type(error).__module__ == "peft.utils.error":  # of lora_target_modules
        return str(error)
    if isinstance(error, ImportError):
        return missing_extra(error)
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # of Rust's libraries: safetensors, tokenizers
        error = OSError(int(found[1]), os.strerror(int(found[1])))
    if type(error).__name__ == "SafetensorError":  # of quantized weights, which are not loaded before
        return f"a file of weights is damaged ({error}): restore it, or pass another model"
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = f"the disk is full: {error.filename or 'the output'} cannot be written ({error.strerror})"
        return f"{what}. Free some space, and continue by the same command with --resume-from-checkpoint auto"
    if error.errno in _PATHS and error.filename:
        return f"{error.filename} cannot be opened or written ({error.strerror}): choose another path"
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    if type(error) is OSError and error.errno is None and "/transformers/" in "".join(raised_in):
        return f"the model cannot be loaded: {str(error).strip().splitlines()[0]} Without network: --model FOLDER"
    return None


def print_error(command: str, message: str) -> None:
    """Print an error as one line, with the rank in a distributed run."""
    rank = os.environ.get("RANK")
    print(f"{command}: error: {f'(rank {rank}) ' if rank else ''}{printable(message)}", file=sys.stderr)


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if (text := describe_error(error)) is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print_error(Path(sys.argv[0]).name, text)
