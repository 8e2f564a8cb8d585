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
VIEW = "G2PO_VIEW"  # variable: serve the viewer beside the training
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Have a launched process end when its launcher is killed, e.g. by the kernel's out-of-memory killer (on Linux).

    Launched processes have their own sessions, so no signal reaches them.
    """
    if os.environ.pop(_LAUNCHED, None):
        getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def launch(arguments: Sequence[str], num_processes: int | None, config: Path | None) -> None:
    """Start `g2po *arguments` in several processes and wait for them; exit with the code of the first that failed.

    `config` is Accelerate's configuration. `None`: ddp.yaml, or processes on the CPU if there is no GPU.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes report errors
    os.environ[_LAUNCHED] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # Ctrl-C: until there is a checkpoint
    try:
        if config is None and not torch.cuda.is_available():
            _launch_on_cpu(arguments, num_processes)
        else:
            _launch_by_accelerate(arguments, num_processes, config)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    except SignalException as stopped:
        sys.exit(130 if stopped.sigval == signal.SIGINT else 128 + stopped.sigval)


def _launch_on_cpu(arguments: Sequence[str], num_processes: int) -> None:
    """Start processes by torchrun, as Accelerate does with GPUs; without GPUs it supports MPI only."""
    from torch.distributed.run import main

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, which it announces
    main(["--standalone", "--nproc_per_node", str(num_processes), "--module", "g2po_trl", *arguments])


def _launch_by_accelerate(arguments: Sequence[str], num_processes: int | None, config: Path | None) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    from .recipe_files import find_config

    options = ["--config_file", str(config or find_config("ddp", kind="accelerate"))]
    options += ["--num_processes", str(num_processes)] if num_processes else []
    options += ["--main_process_port", "0", "--module", "g2po_trl"]
    launch_command(launch_command_parser().parse_args([*options, *arguments]))
