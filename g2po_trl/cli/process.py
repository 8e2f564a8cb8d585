"""Set up the process of a command or recipe, before it imports torch and TRL."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from ..utils.show import outlive_readers

# What libraries write at every start, about something that no user has asked for: logger -> how the message begins.
_NOISE = {"bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community"}


def set_up_process() -> None:
    """Keep known noise out of the output, and progress bars out of files.

    The process also outlives the readers of its output, and prints what a terminal cannot show as a question mark.
    """
    outlive_readers()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        warnings.filterwarnings("ignore", "IProgress not found")  # of notebooks without ipywidgets, for bars
    for name, beginning in _NOISE.items():
        logging.getLogger(name).addFilter(lambda record, text=beginning: not str(record.msg).startswith(text))
    # TRL and PEFT read it of every model.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
