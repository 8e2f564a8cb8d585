"""Programs in processes of their own, as `python …` runs them, whose imports are paid for once.

Importing torch, transformers and TRL takes eight seconds of CPU. A server (`multiprocessing`'s fork server, one for
each pytest worker) has imported them, and a program runs in a fork of it: as `__main__`, with its own arguments,
folder, variables and output files. What is about imports or the start of Python is tested with `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import math
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).parent
PRELOADED = ["torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "trl.trainer.grpo_trainer"]
PRELOADED += ["g2po_trl.trainer", "g2po_trl.ppo.trainer", "g2po_trl.evaluation.evaluate"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Program(_context.Process):
    """A running program, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, arguments, stdout, stderr, cwd, env):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read where the server imports torch: no threads in it
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else dict(env)
        self.args = [str(argument) for argument in arguments]
        given = (self.args, str(stdout), str(stderr), str(cwd or os.getcwd()), environment)
        super().__init__(target=_main, args=given)
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        super().kill()
        self.join()


def start(*arguments, stdout, stderr=None, cwd=None, env=None) -> Program:
    """Start a program; its output is appended to the files `stdout` and `stderr` (default: the same)."""
    return Program(arguments, stdout, stdout if stderr is None else stderr, cwd, env)


def run(*arguments, cwd=None, env=None, timeout: float | None = 300) -> subprocess.CompletedProcess:
    """What `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, …)` does."""
    return _run([{}], arguments, cwd, env, timeout)


def run_script(ranks: int, name: str, *arguments, timeout: float = 300) -> None:
    """Run a script of this folder on so many ranks, without a GPU; all have to succeed."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = run_ranks(ranks, TESTS / name, *arguments, env=env, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]


def run_ranks(number: int, *arguments, env=None, timeout: float = 300) -> subprocess.CompletedProcess:
    """What `torch.distributed.run --nproc_per_node NUMBER` does; a single rank has no launcher's variables."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    ranks = [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in range(number)] if number > 1 else [{}]
    return _run(ranks, arguments, None, env, timeout)


def _run(ranks: list[dict], arguments, cwd, env, timeout: float | None) -> subprocess.CompletedProcess:
    """One program for each of these variables; the first that fails ends them all."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else env
    deadline, code, started = time.monotonic() + (math.inf if timeout is None else timeout), 0, []
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"out{rank}"), Path(folder, f"err{rank}")) for rank in range(len(ranks))]
        try:
            for (out, err), rank in zip(files, ranks):
                variables = {**env, **{name: str(value) for name, value in rank.items()}}
                started.append(start(*arguments, stdout=out, stderr=err, cwd=cwd, env=variables))
            while code == 0 and any(rank.poll() is None for rank in started):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(started[0].args, timeout)
                time.sleep(0.01)
                code = next((rank.poll() for rank in started if rank.poll()), 0)
        finally:
            for rank in started:
                rank.kill()
        output, errors = ("".join(pair[i].read_text() for pair in files) for i in (0, 1))
        return subprocess.CompletedProcess(started[0].args, code, output, errors)


def _main(arguments: list[str], stdout: str, stderr: str, cwd: str, environment: dict[str, str]) -> None:
    gc.freeze()  # what the server has imported is not collected again
    os.setsid()
    for path, number in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != TESTS]
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[:0] = arguments[1:], [cwd]
            sys.modules.pop(arguments[1], None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *arguments[2:]], [""]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).resolve().parent)]
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What Python does at its end, and multiprocessing does not.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
