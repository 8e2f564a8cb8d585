"""AppWorld: code and completions read by hand; with `make test-appworld`, worlds, played, killed, hung and grown."""

import json
import sys
import threading
import time
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import fake_appworld
import psutil
import pytest
from refusals import refused
from returning import check_played_again

from g2po_envs.appworld import AppworldEnvironment, Installation
from g2po_envs.appworld.prompts import parse_think_code
from g2po_envs.appworld.server import AppworldServer, AppworldServerError
from g2po_trl import EnvironmentPool, Observation, PoolLimits

ROOT = Path(__file__).parents[2]
INSTALLATION = Installation(str(ROOT / ".venv-appworld"))
LOGIN = (
    "password = apis.supervisor.show_account_passwords()[0]['password']\n"
    "token = apis.simple_note.login(username='ines.halloran@example.com', password=password)['access_token']"
)
RIGHT = [
    LOGIN,
    "note = apis.simple_note.search_notes(access_token=token, query='Groceries')[0]['note_id']",
    "text = apis.simple_note.show_note(note_id=note, access_token=token)['content']\nprint(text)",
    "apis.supervisor.complete_task(answer=len(text.splitlines()))",
]
ENDLESS = "while True:\n    pass"
UNSTOPPABLE = "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
WRONG = [LOGIN, "print(1 / 0)", "apis.supervisor.complete_task(answer='hat')"]


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


# -- with a server that stands in for AppWorld's: what is ours around it ----------------------------------------------


@pytest.fixture
def stand_in(tmp_path):
    fake_appworld.install(tmp_path)
    return Installation(str(tmp_path))


@pytest.fixture
def opened(stand_in):
    """Worlds of the stand-in, with the options of the environment."""
    made = []

    def make(**options):
        made.append(AppworldEnvironment(stand_in, **options))
        made[-1].reset("task")
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_tasks_are_chosen_by_difficulty_and_what_is_not_there_is_refused(stand_in):
    data = stand_in.root / "data"
    for task_id, difficulty in (("a", 1), ("b", 3)):
        (data / "tasks" / task_id / "ground_truth").mkdir(parents=True)
        (data / "tasks" / task_id / "ground_truth/metadata.json").write_text(json.dumps({"difficulty": difficulty}))
    (data / "datasets").mkdir()
    (data / "datasets/dev.txt").write_text("a\nb\n")
    assert [row["task_id"] for row in stand_in.rows("dev", [1, 2])] == ["a"]
    for field, words in (("dataset", ["train"]), ("difficulties", ["dev", [4]])):
        with refused(field):
            stand_in.rows(*words)


def test_endless_or_refused_code_costs_a_step_or_its_own_episode_never_its_neighbours(opened, monkeypatch):
    monkeypatch.setattr("g2po_envs.appworld.environment._NO_ANSWER", 1.0)
    one, two = (opened(code_timeout=1.0, max_memory=2.5e8, refused=["..."]) for _ in "ab")
    one.step("kept = 7")
    stopped = one.step(ENDLESS)
    assert "Execution timed out after 1 seconds." in stopped.observation.text and not stopped.terminated
    assert "MemoryError" in one.step("much = bytearray(10**9)").observation.text
    assert "'...' is not allowed" in one.step("done = 1\n...").observation.text
    assert one.step("print(kept)").observation.text == "7", "the world goes on"
    ended = one.step(UNSTOPPABLE)
    assert ended.terminated and ended.reward == 0 and "timed out after 1 seconds" in ended.observation.text
    assert ended.info["failure_reason"].startswith("endless code:") and not ended.info["success"]
    assert two.step("print(8)").observation.text == "8"
    assert one.reset("task") and one.step("done = 1").reward == 10.0, "in a new server"


def test_no_answer_is_ever_anothers(stand_in):
    """Whoever gets the port of a server that died, another AppWorld for one, is not asked in its place."""
    server = AppworldServer(stand_in)
    assert "supervisor" in server.call("initialize", task_id="t", timeout_seconds=1)
    with pytest.raises(OSError, match="in use"):
        fake_appworld.Server(("127.0.0.1", server.port), fake_appworld.Handler)
    server.process.kill()
    server.process.wait()
    with fake_appworld.Server(("127.0.0.1", server.port), fake_appworld.Handler) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        with pytest.raises(AppworldServerError, match=r"task_completed lost the server \(was killed by SIGKILL\)"):
            server.call("task_completed")
        impostor.shutdown()


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


def ask(port, **headers):
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/execute", json.dumps({"code": "6 * 7"}), headers)
    answer = connection.getresponse()
    return answer.status, {name.lower() for name, _ in answer.getheaders()}, answer.read()


def test_code_is_executed_for_the_environment_alone(stand_in, tmp_path):
    """Not for another user of this machine, nor for a page in a browser, under whatever name it has this address.

    The app executes code for everybody, as AppWorld's does.
    """
    pytest.importorskip("uvicorn")
    packages = tmp_path / "packages" / "appworld" / "serve"
    packages.mkdir(parents=True)
    (packages / "environment.py").write_text(OPEN_APP)
    start = f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec "{sys.executable}" "$@"\n'
    stand_in.python.write_text(start)
    server = AppworldServer(stand_in)
    assert server.call("execute", code="6 * 7") == 42
    key, page = f"Bearer {server._key}", {"Origin": "http://elsewhere.example"}
    for headers in ({}, page, {"Authorization": "Bearer x"}, {"Authorization": key, "Host": "elsewhere.example"}):
        status, names, body = ask(server.port, **headers)
        assert status == 403 and b"42" not in body and not [one for one in names if one.startswith("access-")]
    assert ask(server.port, Authorization=key)[0] == 200 == ask(server.port, Authorization=key, Host="localhost")[0]
    process = psutil.Process(server.process.pid)
    assert server._key not in str([process.cmdline(), process.environ()]), "code in an episode reads those of others"
    server.close()


# -- with AppWorld ----------------------------------------------------------------------------------------------------


def servers():
    """AppWorld servers that run now, of this installation."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
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


@pytest.mark.appworld
@pytest.mark.skipif(not (INSTALLATION.root / "data").exists(), reason="AppWorld is not here: `make test-appworld`")
@pytest.mark.usefixtures("nothing_left")
class TestRealWorlds:
    def test_a_group_plays_the_same_task_at_the_same_time(self):
        """AppWorld keeps a world's state in a folder named after its task: each server needs a root of its own."""
        with make_pool() as pool:
            for _ in range(2):
                assert all(isinstance(o, Observation) for o in pool.reset([{"task_id": "tiny000_1"}] * 8))
                last = {}
                for turn in range(4):
                    codes = {slot: (WRONG, RIGHT)[slot % 2][turn:] for slot in range(8)}
                    last |= pool.step({slot: code[0] for slot, code in codes.items() if code})
                assert [last[slot].reward for slot in range(8)] == [0.0, 10.0] * 4
                assert last[1].info == {"success": True, "score": 1.0, "completed": True}
        assert not (INSTALLATION.root / "experiments" / "outputs" / "g2po_trl").exists()

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
