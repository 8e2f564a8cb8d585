"""Start several processes through Accelerate; each runs `python -m g2po_trl …`."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LAUNCHED = "G2PO_LAUNCHED"  # variable of the processes that are started here
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Have a launched process, whose session gets no signal, end when its launcher is killed (on Linux)."""
    if os.environ.pop(_LAUNCHED, None):
        getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def launch(arguments: Sequence[str], num_processes: int | None, config: Path | None) -> None:
    """Start `g2po *arguments` in several processes and wait for them; exit with the code of the first that failed.

    They are started with Accelerate's configuration, or on the CPU by torchrun: there Accelerate supports MPI only.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)  # the processes report errors
    os.environ[_LAUNCHED] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # Ctrl-C: until there is a checkpoint
    words = ["--module", "g2po_trl", *arguments]
    try:
        if config is None:
            torchrun(["--standalone", "--nproc_per_node", str(num_processes), *words])
        else:
            options = ["--num_processes", str(num_processes)] if num_processes else []
            options += ["--config_file", str(config), "--main_process_port", "0", *words]
            launch_command(launch_command_parser().parse_args(options))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    except SignalException as stopped:
        sys.exit(130 if stopped.sigval == signal.SIGINT else 128 + stopped.sigval)
