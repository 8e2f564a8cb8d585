"""More than one process, by Accelerate; each runs `python -m g2po_trl …`."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_LAUNCHER = "G2PO_LAUNCHER"  # variable with the process that waits for this one


def end_with_launcher() -> None:
    """In a process that `launch` has started: end when the launcher was killed, as by the kernel when memory is short.

    Nobody else would end it: launched processes are in sessions of their own.
    """
    if _LAUNCHER in os.environ:
        threading.Thread(target=_watch, args=(int(os.environ.pop(_LAUNCHER)),), daemon=True).start()


def _watch(pid: int) -> None:
    import psutil

    try:
        launcher = psutil.Process(pid)
        while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1.0)
    except psutil.NoSuchProcess:
        pass
    print("g2po: the process that launched this one was killed: ending", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10.0)
    os.kill(os.getpid(), signal.SIGKILL)


def launch(arguments: Sequence[str], num_processes: str | None, config: Path | None) -> None:
    """Start the processes and wait for them.

    Args:
        arguments: of `g2po`, in each process.
        num_processes: `None`: as many as the configuration says.
        config: Accelerate's; `None`: a process a GPU (ddp.yaml), or processes on the CPU where there is no GPU.

    Raises:
        SystemExit: with the exit code of the first process that failed; 130 after Ctrl-C.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes say what happened
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        if config is None and not torch.cuda.is_available():
            _on_the_cpu(arguments, num_processes)
        else:
            _by_accelerate(arguments, num_processes, config)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    except SignalException as stopped:
        sys.exit(130 if stopped.sigval == signal.SIGINT else 128 + stopped.sigval)


def _on_the_cpu(arguments: Sequence[str], num_processes: str) -> None:
    """Accelerate starts several processes without GPUs by MPI alone; this is how it starts those with GPUs."""
    from torch.distributed.run import get_args_parser, run

    options = ["--standalone", "--nproc_per_node", num_processes, "--module", "g2po_trl"]
    run(get_args_parser().parse_args([*options, *arguments]))


def _by_accelerate(arguments: Sequence[str], num_processes: str | None, config: Path | None) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    from .recipe_files import find_config

    config = config or find_config("ddp", kind="accelerate")
    options = ["--config_file", str(config), *(["--num_processes", num_processes] if num_processes else [])]
    options += ["--main_process_port", "0", "--module", "g2po_trl"]
    launch_command(launch_command_parser().parse_args([*options, *arguments]))
