"""What a command writes besides its own lines: no bars into files, no known noise, every other warning."""

import os
import subprocess
import sys

import pytest

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


@pytest.fixture
def environment():
    """This process's, without the settings that users may have."""
    return {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "TQDM_DISABLE")}


def test_a_file_gets_no_bars_and_no_known_noise(environment):
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == "compiled without GPU support\n`is_something_else` is deprecated\n"
    assert done.stdout == "passive\n"
    environment |= {"TQDM_DISABLE": "", "OMP_WAIT_POLICY": "active"}  # the user's settings win
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "3/3" in done.stderr and done.stdout == "active\n"


# As a training: it prints long after `head` has ended, and so does its environment.
LONG = """
import sys
from g2po_trl.cli.process import set_up_process
set_up_process()
from pathlib import Path
from g2po_trl import Observation, TextEnvironment
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentPool

class Loud(TextEnvironment):
    def reset(self):
        print("reset", flush=True)
        print("reset", file=sys.stderr, flush=True)
        return Observation("played")

print("started", flush=True)
sys.stdin.read()
with EnvironmentPool(Loud, PoolLimits(1)) as pool:
    played = pool.reset([{}])[0]
    print("step 1", flush=True)
    print("a warning", file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text(getattr(played, "text", str(played)))
print("step 2")
sys.exit(3)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_goes_on_when_the_reader_of_its_output_has_ended(tmp_path, unbuffered):
    command = [sys.executable, "-c", LONG, tmp_path / "done"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}) as process:
        assert process.stdout.readline() == b"started\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(60) == 3, "its own code"
    assert (tmp_path / "done").read_text() == "played"


SCRIPT = """
from g2po_trl.cli.process import set_up_process
from g2po_trl.utils.errors import G2POError
set_up_process()
raise """


@pytest.mark.parametrize(("error", "lines"), [("G2POError('beta is -1: set it to 0')", 1), ("KeyError('x')", 4)])
def test_a_script_prints_what_its_user_can_fix_as_one_line(tmp_path, error, lines):
    (script := tmp_path / "recipe.py").write_text(SCRIPT + error)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == lines, done.stderr
    assert lines > 1 or done.stderr == "recipe.py: error: beta is -1: set it to 0\n"
