"""A server of ours over loopback plays as in process does; one that is cut off costs an episode, not the run."""

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

pytest.importorskip("openenv")

from letter_environment import drawing
from openenv.core.client_types import StepResult as Answer
from refusals import refused
from toy_environments import KEY_DOOR_WALKTHROUGHS, KeyDoorEnvironment
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from g2po_envs.adapters import openenv, serving
from g2po_envs.adapters.openenv import RemoteEnvironment, read_observation
from g2po_trl import Observation, StepResult, TextEnvironment
from g2po_trl.environments.loading import load
from g2po_trl.utils.images import as_picture

HELPERS = Path(__file__).parents[1] / "helpers"


@contextmanager
def started(*options):
    """A server of the game with a key and a door, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("-m", "g2po_trl", "serve", "toy_environments.py:KeyDoorEnvironment", "--port", port, *options)
    process, deadline = programs.start(*words, cwd=HELPERS, stdout="/dev/null"), time.monotonic() + 60
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(10)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def server():
    with started() as (_, url):
        yield url


def test_a_remote_environment_plays_as_the_local_one(server):
    remote, local = load(server)(), KeyDoorEnvironment()
    for room, actions in KEY_DOOR_WALKTHROUGHS.items():
        assert remote.reset(key_room=room) == local.reset(key_room=room)
        assert all(remote.step(action) == local.step(action) for action in ["nonsense", *actions])
    remote.close()


def test_requests_of_web_pages_are_refused(server):
    """A page that is open in a browser on the server's machine, also one that has its name mean this machine."""
    address = server.replace("http", "ws") + "/ws"
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2]))) as renamed:
        for url, options in (
            (address, {"origin": "http://evil.example"}),
            (address, {"origin": server}),
            ("ws://evil.example/ws", {"sock": renamed}),
        ):
            with pytest.raises(InvalidStatus):
                connect(url, **options)
    with connect(address) as client:
        client.send(json.dumps({"type": "reset", "data": {"key_room": "hall"}}))
        assert "You wake up" in client.recv()
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        request = urllib.request.Request(f"{server}/reset", b"{}", {"Content-Type": "application/json", **headers})
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request)


def test_a_full_server_is_passed_over_and_a_killed_one_fails_its_own_episodes(server, monkeypatch):
    with started("--max_sessions", "1") as (process, full):
        only = RemoteEnvironment([full], timeout=20)
        only.reset(key_room="hall")
        monkeypatch.setattr(openenv, "_SESSIONS", Counter())  # another worker does not know of this session
        other = RemoteEnvironment([full, server])
        other.reset(key_room="hall")
        assert other._url == server
        with pytest.raises(RuntimeError):
            other.reset(key_room="hall", no_such_column=1)
        process.kill()
        for call in (partial(only.step, "take key"), partial(only.reset, key_room="hall")):
            with pytest.raises(ConnectionError):
                call()
        only.base_urls.append(server)
        assert isinstance(only.reset(key_room="hall"), Observation), "the other server takes it"
        for one in (only, other):
            one.close()


# -- a session of the server, without the server ----------------------------------------------------------------------


class Told(TextEnvironment):
    """Ends as it is told to, and knows a secret."""

    def reset(self):
        return os.environ.get("GAME_TOKEN", "none")

    def step(self, action):
        if action == "die":
            os._exit(1)
        return StepResult("end", 10.0, "terminated" in action, "truncated" in action)


@contextmanager
def session_of(**options):
    """What plays for one client of the server."""
    made = []

    def create(served, *rest, **more):
        made.append(served)
        return SimpleNamespace(add_middleware=lambda *one, **other: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openenv.core.env_server.http_server.create_fastapi_app", create)
        serving.make_app(Told, **options)
    session = made[0]()
    yield session
    session.close()


def remote_with(answer):
    remote = RemoteEnvironment(["http://127.0.0.1:1"])
    remote._client = SimpleNamespace(step=lambda action: answer)
    return remote


def test_the_end_of_a_remote_episode_is_the_environments(monkeypatch):
    """Truncated and terminated is a success here if it was paid, and so it is by a server."""
    monkeypatch.setenv("GAME_TOKEN", "sesame")
    with session_of() as session:
        for ends in ("truncated terminated", "truncated", "terminated"):
            assert session.reset().text == "none", "a worker does not get the variable"
            said = session.step(SimpleNamespace(text=ends))
            fields = said.model_dump(exclude={"reward", "done", "metadata"})
            result = remote_with(Answer(fields, said.reward, said.done)).step("go")
            found = result.reward, result.truncated, result.terminated
            assert found == (10.0, "truncated" in ends, "terminated" in ends)
        session.reset()
        with pytest.raises(RuntimeError):
            session.step(SimpleNamespace(text="die"))
    with session_of(environment_variables=["GAME_TOKEN"]) as session:
        assert session.reset().text == "sesame"


def test_what_other_servers_say(tmp_path):
    rainy = Answer({"text": "x", "info": "it rains"}, 1.0, True)
    assert remote_with(rainy).step("look") == StepResult(Observation("x"), 1.0, terminated=True)
    with refused("read_observation"):
        read_observation({"board": [1], "goal": "Win."})
    picture = as_picture(drawing(1))
    assert read_observation({"text": "a", "images": [picture.data_url]}).images == (picture,)
    (tmp_path / "of_this_machine.png").write_bytes(picture.png)
    with refused("images"):
        read_observation({"text": "a", "images": [str(tmp_path / "of_this_machine.png")]})
