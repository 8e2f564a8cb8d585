"""AppWorld: code and completions read by hand; with `make test-appworld`, worlds, played, killed, hung and grown."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.client import HTTPConnection
from http.server import HTTPServer
from pathlib import Path

import fake_appworld
import psutil
import pytest
from refusals import refused
from returning import check_played_again

from g2po_envs.appworld import AppworldEnvironment, Installation
from g2po_envs.appworld.prompts import parse_think_code
from g2po_envs.appworld.server import AppworldServer, AppworldServerError
from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult
from g2po_trl.environments.pool.pool import EnvironmentFailure

ROOT = Path(__file__).parents[2]
INSTALLATION = Installation(str(ROOT / ".venv-appworld"))
LOGIN = (
    "password = apis.supervisor.show_account_passwords()[0]['password']\n"
    "token = apis.simple_note.login(username='ines.halloran@example.com', password=password)['access_token']"
)
RIGHT = {
    "tiny000_1": [
        LOGIN,
        "note = apis.simple_note.search_notes(access_token=token, query='Groceries')[0]['note_id']",
        "text = apis.simple_note.show_note(note_id=note, access_token=token)['content']\nprint(text)",
        "apis.supervisor.complete_task(answer=len(text.splitlines()))",
    ],
    "tiny000_2": ["apis.supervisor.complete_task(answer='scarf')"],
}
ENDLESS = "while True:\n    pass"
UNSTOPPABLE = "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
WRONG = ["print(1 / 0)", "apis.supervisor.complete_task(answer='hat')"]


# -- without AppWorld -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "code", "valid"),
    [
        ("<think>so</think>\n<code>print(1)</code>", "print(1)", True),
        ("<think></think><code>\n```python\nx = 1\nprint(x)\n```\n</code>", "x = 1\nprint(x)", True),
        ("<code>print(1)</code>", "print(1)", False),
        ("<think>so</think> print(1)", "", False),
        ("<think>so</think><CODE>if a:\n    b()</CODE>", "if a:\n    b()", True),
    ],
)
def test_completions_are_read(completion, code, valid):
    assert parse_think_code(completion) == (code, valid)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("directory", lambda here: AppworldEnvironment(Installation(str(here / "empty")))),
        ("dataset", lambda here: Installation(str(here)).rows("train")),
        ("difficulties", lambda here: Installation(str(here)).rows("dev", [4])),
        ("key", lambda here: AppworldEnvironment(Installation(str(here)), key="colour")),
        ("refused", lambda here: AppworldEnvironment(Installation(str(here)), refused="...")),
        ("code_timeout", lambda here: AppworldEnvironment(Installation(str(here)), code_timeout=0.5)),
    ],
)
def test_tasks_are_chosen_by_difficulty_and_what_is_not_there_is_refused(tmp_path, field, call):
    fake_appworld.install(tmp_path)
    installation = Installation(str(tmp_path))
    for task_id, difficulty in (("a", 1), ("b", 3), ("c", 2)):
        truth = installation.root / "data" / "tasks" / task_id / "ground_truth"
        truth.mkdir(parents=True)
        (truth / "metadata.json").write_text(json.dumps({"difficulty": difficulty}))
    (installation.root / "data" / "datasets").mkdir()
    (installation.root / "data" / "datasets" / "dev.txt").write_text("a\nb\nc\n")
    assert [row["task_id"] for row in installation.rows("dev", [1, 2])] == ["a", "c"]
    assert [row["task_id"] for row in installation.rows("dev")] == ["a", "b", "c"]
    with refused(field):
        call(tmp_path)


# -- with a server that stands in for AppWorld's: what is ours around it ----------------------------------------------


@pytest.fixture
def stand_in(tmp_path):
    fake_appworld.install(tmp_path)
    return Installation(str(tmp_path))


def test_endless_code_costs_a_step_or_its_own_episode_never_its_neighbours(stand_in, monkeypatch):
    monkeypatch.setattr("g2po_envs.appworld.environment._NO_ANSWER", 1.0)
    worlds = [AppworldEnvironment(stand_in, code_timeout=1.0) for _ in range(2)]
    for world in worlds:
        world.reset("task")
    one, two = worlds
    one.step("kept = 7")
    stopped = one.step(ENDLESS)
    assert "Execution timed out after 1 seconds." in stopped.observation.text and not stopped.terminated
    assert one.step("print(kept)").observation.text.strip() == "7", "the world goes on"
    ended = one.step(UNSTOPPABLE)
    assert ended.terminated and ended.reward == 0 and "timed out after 1 seconds" in ended.observation.text
    assert ended.info["failure_reason"].startswith("endless code:") and not ended.info["success"]
    assert two.step("print(8)").observation.text.strip() == "8"
    assert one.reset("task") and one.step("done = 1").reward == 10.0, "in a new server"
    for world in worlds:
        world.close()


def test_refused_code_is_not_run(stand_in):
    world = AppworldEnvironment(stand_in, refused=["...", "except"])
    world.reset("task")
    for code, word in (("print(1)\n...", "..."), ("try:\n    done = 1\nEXCEPT: pass", "except")):
        result = world.step(code)
        assert result.observation.text == f"Execution failed. {word!r} is not allowed in your code."
        assert not result.terminated
    assert world.step("print(1)").observation.text.strip() == "1"
    world.close()


def test_no_answer_is_ever_anothers(stand_in):
    """Whoever gets the port of a server that died, another AppWorld for one, is not asked in its place."""
    server = AppworldServer(stand_in)
    assert "supervisor" in server.call("initialize", task_id="t", timeout_seconds=1)
    with pytest.raises(OSError, match="in use"):
        HTTPServer(("127.0.0.1", server.port), fake_appworld.Handler)
    server.process.kill()
    server.process.wait()
    impostor = HTTPServer(("127.0.0.1", server.port), fake_appworld.Handler)
    threading.Thread(target=impostor.serve_forever, daemon=True).start()
    try:
        with pytest.raises(AppworldServerError, match=r"task_completed lost the server \(was killed by SIGKILL\)"):
            server.call("task_completed")
    finally:
        impostor.shutdown()
        impostor.server_close()


def test_code_that_takes_all_memory_gets_an_error(stand_in):
    world = AppworldEnvironment(stand_in, max_memory=2.5e8)
    world.reset("task")
    assert "MemoryError" in world.step("kept = bytearray(10**9)").observation.text
    assert world.step("print(1)").observation.text.strip() == "1"
    world.close()


OPEN_APP = """
import asyncio, json

async def app(scope, receive, send):
    if scope["type"] == "http":
        body = (await receive())["body"]
        headers = [(b"access-control-allow-origin", b"*"), (b"access-control-allow-credentials", b"true")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        answer = json.dumps({"output": eval(json.loads(body)["code"])})
        await send({"type": "http.response.body", "body": answer.encode()})
"""


@pytest.fixture
def open_app(tmp_path):
    """An installation whose app executes code for everybody, as AppWorld's does."""
    pytest.importorskip("uvicorn")
    fake_appworld.install(tmp_path)
    packages = tmp_path / "packages" / "appworld" / "serve"
    packages.mkdir(parents=True)
    (packages / "environment.py").write_text(OPEN_APP)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec "{sys.executable}" "$@"\n')
    return Installation(str(tmp_path))


def ask(port, method="POST", **headers):
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, "/execute", json.dumps({"code": "6 * 7"}), headers)
    answer = connection.getresponse()
    return answer.status, {name.lower() for name, _ in answer.getheaders()}, answer.read()


def test_code_is_executed_for_the_environment_alone(open_app):
    """Not for another user of this machine, nor for a page in a browser, under whatever name it has this address."""
    server = AppworldServer(open_app)
    assert server.call("execute", code="6 * 7") == 42
    key, page = f"Bearer {server._key}", {"Origin": "http://elsewhere.example"}
    for headers in ({}, page, {"Authorization": "Bearer x"}, {"Authorization": key, "Host": "elsewhere.example"}):
        for method in ("POST", "OPTIONS", "GET"):
            status, names, body = ask(server.port, method, **headers)
            assert status == 403 and b"42" not in body and not [one for one in names if one.startswith("access-")]
    assert ask(server.port, Authorization=key)[0] == 200 == ask(server.port, Authorization=key, Host="localhost")[0]
    process = psutil.Process(server.process.pid)
    assert server._key not in str([process.cmdline(), process.environ()]), "code in an episode reads those of others"
    server.close()


# -- with AppWorld ----------------------------------------------------------------------------------------------------

real = [
    pytest.mark.appworld,
    pytest.mark.skipif(
        not (INSTALLATION.root / "data").exists(), reason="AppWorld is not set up here: `make test-appworld`"
    ),
]


def servers():
    """AppWorld servers that run now, of this installation."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "appworld.serve.environment:app" in command and str(INSTALLATION.python) in command[0]:
            found.append(process)
    return found


@pytest.fixture
def nothing_left():
    assert servers() == []
    yield
    deadline = time.monotonic() + 10
    while servers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert servers() == []


def make_pool(**options):
    return EnvironmentPool(partial(AppworldEnvironment, INSTALLATION, **options), PoolLimits(2))


def play(pool, slots):
    """Codes by slot -> last results; a slot that has failed or ended is left alone."""
    last = {}
    for turn in range(max(map(len, slots.values()))):
        live = {
            slot: codes[turn]
            for slot, codes in slots.items()
            if turn < len(codes)
            and (slot not in last or (isinstance(last[slot], StepResult) and not last[slot].terminated))
        }
        last |= pool.step(live) if live else {}
    return last


@pytest.mark.usefixtures("nothing_left")
class TestRealWorlds:
    pytestmark = real

    def test_a_group_plays_the_same_task_at_the_same_time(self):
        """AppWorld keeps a world's state in a folder named after its task: each server needs a root of its own."""
        tasks = [{"task_id": "tiny000_1"}] * 8
        with make_pool() as pool:
            for _ in range(2):
                assert all(isinstance(o, Observation) for o in pool.reset(tasks))
                codes = {slot: RIGHT["tiny000_1"] if slot % 2 else [LOGIN, *WRONG] for slot in range(8)}
                last = play(pool, codes)
                assert [last[slot].reward for slot in range(8)] == [0.0, 10.0] * 4
                assert last[1].info == {"success": True, "score": 1.0, "completed": True}
        assert not (INSTALLATION.root / "experiments" / "outputs" / "g2po_trl").exists()

    def test_a_server_killed_and_one_made_to_hang(self):
        with make_pool(code_timeout=5.0) as pool:
            tasks = [{"task_id": "tiny000_2"}] * 4
            pool.reset(tasks)
            killed, hung, *_ = servers()
            killed.kill()
            os.kill(hung.pid, signal.SIGSTOP)
            last = pool.step(dict.fromkeys(range(4), "print(7)"))
            failures = [r for r in last.values() if isinstance(r, EnvironmentFailure)]
            assert len(failures) == 1 and "was killed by SIGKILL" in failures[0].message
            assert sum(isinstance(r, StepResult) and r.terminated for r in last.values()) == 1, "no answer: given up"
            assert sum(isinstance(r, StepResult) and r.observation.text == "7" for r in last.values()) == 2
            assert all(isinstance(o, Observation) for o in pool.reset(tasks)), "the run goes on"
            assert len(servers()) == 4

    def test_a_worker_that_is_killed_takes_its_servers_along(self):
        with make_pool() as pool:
            pool.reset([{"task_id": "tiny000_2"}] * 2)
            pool.step({0: "x = 3", 1: "x = 4"})
            before = set(servers())
            assert len(before) == 2
            os.kill(pool.worker_pids[0], signal.SIGKILL)
            last = pool.step({0: "print(x)", 1: "print(x)"})
            assert not any(isinstance(result, EnvironmentFailure) for result in last.values())
            assert ["3" in last[0].observation.text, "4" in last[1].observation.text] == [True, True], "played again"
            after = set(servers())
            assert len(after) == 2 and len(before & after) == 1, "the killed worker's server is gone"

    def test_the_recipe_trains(self, tmp_path):
        (tmp_path / "appworld-tiny").symlink_to(INSTALLATION.directory)
        run = subprocess.run(
            [sys.executable, ROOT / "recipes" / "train_appworld.py", "--appworld", tmp_path / "appworld"]
            + ["--output_dir", tmp_path / "run", "--num_environment_workers", "2"],
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr[-3000:]
        assert "iteration   2/2" in run.stdout and "success: all" in run.stdout

    def test_code_is_run_again(self):
        """Databases, variables, tokens, the clock, chance, and the order of a set, in servers of their own."""
        actions = [
            f"{LOGIN}\nprint(token)",
            "import datetime, random\nprint(datetime.datetime.now(), random.random(), {'a', 'b', 'c'}, hash('e'))",
            "note = apis.simple_note.create_note(access_token=token, title='New', content='x')\nprint(note)",
            "print(missing)",
            "print(apis.simple_note.search_notes(access_token=token, query=''))",
            "apis.supervisor.complete_task(answer=3)",
        ]
        factory = partial(AppworldEnvironment, INSTALLATION, key="output and calls", start_timeout=300.0)
        episode = check_played_again(factory, {"task_id": "tiny000_1"}, actions, max_turns=9)
        assert episode.success and len(episode.steps) == 6
