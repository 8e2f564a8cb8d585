"""Agents that are programs: what they get, what they print, and how they end."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from refusals import refused
from scripted_agents import ASKING, play, running, says, wait_until

from g2po_trl import AgentCommand, AgentEnvironment, EnvironmentPool, PoolLimits
from g2po_trl.agents.session import AgentError

SOLVE = (
    ASKING
    + """said = ""
for turn in range(9):
    said = ask(sys.argv[1] + said)
    if said == "crash":
        print("first line", file=sys.stderr)
        print("it broke", file=sys.stderr)
        sys.exit(3)
    if said == "abort":
        os.abort()
    if said == "sleep":
        import time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    if said == "done":
        open(os.path.join(os.environ["EPISODE_FOLDER"], "result.txt"), "w").write("kept")
        print("done", turn, sorted(os.listdir()))
        sys.exit(0)
"""
)


@pytest.fixture
def solve(tmp_path, monkeypatch):
    (tmp_path / "solve.py").write_text(SOLVE)
    monkeypatch.chdir(tmp_path)
    return "python solve.py {question} pids"


async def by_text(task, stdout, folder):
    return 1.0, (folder / "result.txt").read_text() == "kept", {"stdout": stdout}


def test_a_program_asks_and_prints(solve):
    seen, end = play(AgentCommand(solve, by_text), [says("a"), says("b"), says("done")], question="Why?")
    assert [one.text for one in seen] == ["user: Why?", "user: Why?a", "user: Why?b"]
    assert end.reward == 1.0 and end.info == {"success": True, "stdout": "done 2 ['solve.py']\n"}


@pytest.mark.parametrize("text", ["$(touch hacked); `id` && rm -rf *", "'\" \n--x", "{question} {{", "", "-c p", "\\"])
def test_the_text_of_a_column_is_one_argument(solve, text):
    seen, _ = play(AgentCommand(solve, lambda: 1), [], question=text)
    assert seen[0].request.messages[0]["content"] == text and os.listdir() == ["solve.py"]


def test_values_that_are_no_text(solve):
    command = ["python", Path("solve.py"), "{number}, {{}}, {things}={nothing}{cut}"]
    seen, _ = play(AgentCommand(command, lambda: 1), [], number=3, things=[1, "ü"], nothing=None, cut="\ud800\0")
    assert seen[0].text == 'user: 3, {}, [1, "ü"]=null?'


def test_a_program_that_fails(solve):
    for said, reason in (("crash", "exit status 3: it broke"), ("abort", "exit status 134")):
        _, end = play(AgentCommand(solve, lambda stdout: 1), [says(said)], question="x")
        assert (end.reward, end.terminated, end.info["failure_reason"]) == (0, True, f"agent error: {reason}")
    graded = AgentCommand(solve, lambda returncode, stderr: (returncode, True, {"stderr": stderr}))
    _, end = play(graded, [says("crash")], question="x")
    assert end.reward == 3 and end.info == {"success": True, "stderr": "first line\nit broke\n"}
    _, end = play(AgentCommand(solve, lambda: 1), [says("go")] * 2, max_turns=2, question="x")
    assert end.truncated and end.info["agent_error"].endswith("HTTP Error 404: Not Found")


def test_a_program_that_fails_before_it_asks(solve):
    for command, kind in (("python nowhere.py", AgentError), ("no_such_program", FileNotFoundError)):
        with pytest.raises(kind):
            play(AgentCommand(command, lambda returncode: 1), [])
    with refused("command"):
        play(AgentCommand(solve, lambda: 1), [], text="x")


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_program_that_takes_too_long(solve, tmp_path):
    environment = AgentEnvironment(AgentCommand(solve, lambda: 1, timeout=2), 5)
    environment.reset(question="x")
    time.sleep(2)  # the model's own time
    assert not environment.step(says("go")).terminated
    end = environment.step(says("sleep"))
    assert end.info["failure_reason"] == "time limit: it took more than 2 s"
    wait_until(lambda: not any(map(is_running, (tmp_path / "pids").read_text().split())))


DAEMONS = """
import os, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "60417"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execv("/bin/sleep", ["sleep", "60417"])
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons stay")
@pytest.mark.parametrize("end", ["returns", "is closed", "its worker is killed"])
def test_daemons_end_with_their_episode(solve, tmp_path, end):
    (tmp_path / "solve.py").write_text(f"{DAEMONS}\n{SOLVE}".replace("sys.argv[1] + said", "'x'"))
    command = AgentCommand("python solve.py", lambda: 1)
    with EnvironmentPool(partial(AgentEnvironment, command, 5), PoolLimits(1)) as pool:
        pool.reset([{}])
        wait_until(lambda: len(running("60417")) == 2)  # one may be about to become a `sleep`
        if end == "returns":
            assert pool.step({0: says("done")})[0].reward == 1
        elif end == "is closed":
            pool.end()
        else:
            os.kill(pool.worker_pids[0], signal.SIGKILL)
        wait_until(lambda: not running("60417"))


def test_output_beyond_its_limit_loses_its_middle(solve, tmp_path):
    program = "import sys\nfor _ in range(100):\n    sys.stdout.write('x' * 2**20)\nprint('last')\n"
    (tmp_path / "solve.py").write_text(f"{program}{SOLVE}")
    command = AgentCommand(solve, lambda stdout: (1, True, {"length": len(stdout), "end": stdout[-200:]}))
    _, end = play(command, [says("done")], question="x")
    assert 2**20 < end.info["length"] < 2**20 + 100 and "xlast\ndone 0" in end.info["end"]


def test_in_the_pool_programs_get_no_secrets_and_end_with_their_worker(solve, tmp_path, monkeypatch):
    program = "import json, os; json.dump(sorted(os.environ), open('seen', 'w'))\n" + SOLVE
    (tmp_path / "solve.py").write_text(program)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    command = AgentCommand("python solve.py x pids", lambda: 1, environment={"MINE": 1})
    with EnvironmentPool(partial(AgentEnvironment, command, 5), PoolLimits(1, environment_step_timeout=2)) as pool:
        pool.reset([{}])
        names = json.loads((tmp_path / "seen").read_text())
        assert "HF_TOKEN" not in names and {"MINE", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_MODEL"} <= set(names)
        assert pool.step({0: says("sleep")})[0].kind == "timeout"
        wait_until(lambda: not any(map(is_running, (tmp_path / "pids").read_text().split())))
