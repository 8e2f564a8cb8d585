"""The pool's processes: what they get from the trainer, and that they die, are killed and hang without a trace."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from faulty_pools import faulty_pool, interrupt_after
from refusals import refused
from toy_environments import KeyDoorEnvironment, Slow

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment
from g2po_trl.environments.pool.pool import place_groups


def ends(pid):
    """Wait for the end of a process that is not our child. A dead one that nobody reaps has ended."""
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("fault", "how"), [("exit 3", "exit status 3"), ("signal 11", "SIGSEGV"), ("fork", "SIGKILL")]
)
def test_ways_to_die(fault, how):
    with faulty_pool() as pool:
        pool.reset([{"number": 1}, {"number": 2}])
        results = pool.step({1: fault})
        assert results[1].kind == "crash" and how in results[1].message and "'number': 2" in results[1].message
        told = pool.step({0: "go"})[0]  # was in the same worker; its key is the process
        assert told.kind == "lost" and "during step of slot 1" in told.message and "'number': 1" in told.message
        with refused("slot 0"):
            pool.step({0: "go"})
        assert pool.reset([{"number": 5}])[0].text == "number 5"


def test_an_interrupted_step_leaves_no_answers_behind():
    with faulty_pool(2) as pool:
        pool.reset([{"number": i} for i in range(4)])
        interrupt_after(0.3)
        with pytest.raises(KeyboardInterrupt):
            pool.step(dict.fromkeys(range(4), "sleep 20"))
        assert pool.worker_pids == []
        with refused("slot 0"):
            pool.step({0: "go"})
        assert [o.text for o in pool.reset([{"number": 8}, {"number": 9}])] == ["number 8", "number 9"]
        assert pool.step({1: "go"})[1].observation.text == "9 go"


def test_a_fork_of_the_trainer_does_not_end_the_workers():
    with faulty_pool() as pool:
        pool.reset([{"number": 1}])
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert pool.step({0: "go"})[0].observation.text == "1 go"


def test_workers_import_neither_torch_nor_a_copy_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "g2po_trl").mkdir()
    (tmp_path / "g2po_trl" / "__init__.py").write_text("raise ImportError('the wrong copy')")
    monkeypatch.chdir(tmp_path)

    class Modules(TextEnvironment):
        def reset(self):
            import sys

            return f"{'torch' in sys.modules}"

    with EnvironmentPool(Modules, PoolLimits(1)) as pool:
        assert pool.reset([{}])[0] == Observation("False")


def test_the_seconds_of_an_episode_are_those_of_its_own_steps_without_replays():
    with EnvironmentPool(partial(Slow, 0.3), PoolLimits(1)) as pool:
        pool.reset([{"turns": 9}] * 2)
        for _ in range(3):
            pool.step({0: "go"})
        assert pool.seconds(0) >= 0.9 and pool.seconds(1) < 0.3
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        assert isinstance(pool.step({0: "go"})[0], StepResult) and 1.2 <= pool.seconds(0) < 2.1
        pool.reset([{"turns": 9}])
        assert pool.seconds(0) < 0.3, "its clock starts anew"


class Daemons(KeyDoorEnvironment):
    """Starts a program in a session of its own, and a daemon that has left its parent too; tells their processes."""

    def reset(self, dies=False):
        command = ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"]
        daemon = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout
        program = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return Observation(f"{program.pid} {daemon.strip()} {os.getpid()} {tempfile.gettempdir()}")


def test_programs_in_a_session_of_their_own_end_with_the_worker():
    with EnvironmentPool(Daemons, PoolLimits(2)) as pool:
        seen = [o.text.split() for o in pool.reset([{}, {}], groups=[0, 1])]
        os.kill(int(seen[0][2]), signal.SIGKILL)
        assert pool.reset([{}, {"dies": True}])[1].kind == "crash"
        assert all(ends(int(pid)) for pid in seen[0][:3])
    assert all(ends(int(pid)) for of_one in seen for pid in of_one[:3])
    assert not any(os.path.exists(of_one[3]) for of_one in seen)


def test_a_worker_that_leaves_its_process_group_ends():
    class Leaving(KeyDoorEnvironment):
        def reset(self):
            os.setpgid(0, os.getpgid(os.getppid()))
            return Observation(str(os.getpid()))

        def step(self, action):
            os.kill(os.getpid(), signal.SIGSTOP)

    with EnvironmentPool(Leaving, PoolLimits(1, environment_step_timeout=0.5)) as pool:
        pid = int(pool.reset([{}])[0].text)
        assert pool.step({0: "stop"})[0].kind == "timeout"
        assert ends(pid)


TRAINER_IS_KILLED = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:]
from g2po_trl import EnvironmentPool, PoolLimits
from test_pool_processes import Daemons
pool = EnvironmentPool(Daemons, PoolLimits(1))
print(pool.reset([{}])[0].text, flush=True)
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
os.close(1)
time.sleep(20)  # a forked process outlives the trainer
"""


def test_a_worker_clears_up_after_a_killed_trainer(tmp_path):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    command = [sys.executable, "-c", TRAINER_IS_KILLED, *folders]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, env=environ)
    *pids, folder = told.stdout.split()
    assert os.path.dirname(folder) == str(tmp_path)
    assert all(ends(int(pid)) for pid in pids) and not os.path.exists(folder)


class Surroundings(TextEnvironment):
    """Tells what a program that it starts is told."""

    def reset(self):
        command = "import json, os, sys; print(json.dumps([sys.path, dict(os.environ)]))"
        text = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
        return Observation(text, state_key=os.environ.get("OPENAI_API_KEY", ""))

    def step(self, action):
        return StepResult(os.environ[action])


def test_programs_an_environment_starts_get_neither_the_trainers_path_nor_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), tmp_path, *sys.path])  # Python skips what is no text
    monkeypatch.delenv("PYTHONPATH", raising=False)
    kept = {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"}
    harmless = {"LC_TIME", "CURL_CA_BUNDLE", "TOKENIZERS_PARALLELISM"}
    for name in (*kept, *harmless, "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "true")
    with EnvironmentPool(Surroundings, PoolLimits(1, environment_variables=["OPENAI_API_KEY"])) as pool:
        (seen,) = pool.reset([{}])
        path, variables = json.loads(seen.text)
        assert str(tmp_path) not in path and "PYTHONPATH" not in variables
        assert not kept & set(variables) and harmless <= set(variables)
        assert variables["OPENAI_API_KEY"] == seen.state_key == "true"
        asked = pool.step({0: "HF_TOKEN"})[0]
        assert asked.kind == "exception" and "workers do not get HF_TOKEN" in asked.message


def test_groups_are_cut_into_equal_parts():
    assert place_groups([5, 5, 5, 2, 2, 7], [0, 0]) == [0, 0, 0, 1, 1, 1]
    assert place_groups([0] * 8, [0] * 8) == list(range(8)) and place_groups([0] * 3, [0] * 8) == [0, 1, 2]
    assert place_groups([0, 1] * 4, [0] * 4) == [0, 2, 0, 2, 1, 3, 1, 3]
    assert place_groups([0, 0], [3, 1, 3]) == [1, 1] and place_groups([], [0, 0]) == []


def test_a_task_that_a_socket_does_not_hold_arrives_whole():
    text = "x" * 900_000
    with faulty_pool() as pool:
        assert pool.reset([{"number": text}])[0].text == f"number {text}"
