"""What a command writes besides its own lines: no bars into files, no known noise, every other warning."""

import contextlib
import os
import subprocess
import sys
import termios

NOISE = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure"
CODE = f"""
import logging, os, sys, warnings
from g2po_trl.cli.process import set_up_process
set_up_process()
import tqdm
logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
logger.warning({NOISE!r}, "No module named 'kernels'")
logger.warning("compiled without GPU support")
warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
for name in ("is_gradient_checkpointing", "is_something_else"):
    warnings.warn(f"`{{name}}` is deprecated", FutureWarning)
for _ in tqdm.tqdm(range(3)):
    pass
print(os.environ["OMP_WAIT_POLICY"])
"""


def run(**environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "TQDM_DISABLE")}
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env={**kept, **environment})


def test_a_file_gets_no_bars_and_no_known_noise():
    done = run()
    assert done.stderr == "compiled without GPU support\n`is_something_else` is deprecated\n"
    assert done.stdout == "passive\n"


def test_the_users_settings_win():
    done = run(TQDM_DISABLE="", OMP_WAIT_POLICY="active")
    assert "3/3" in done.stderr and done.stdout == "active\n"


def test_a_terminal_has_its_bars():
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    kept = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    subprocess.run([sys.executable, "-c", CODE], stderr=terminal, stdout=subprocess.DEVNULL, env=kept, check=True)
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # at the end
        while part := os.read(master, 10_000):
            written += part
    os.close(master)
    assert b"3/3" in written
