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
from unittest.mock import Mock

import programs
import pytest

pytest.importorskip("openenv")

from openenv.core.client_types import StepResult as Answer
from refusals import refused
from tools_by_hand import Safe
from toy_environments import KEY_DOOR_WALKTHROUGHS, FaultyEnvironment, KeyDoorEnvironment
from vision_models import drawing
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from g2po_envs.adapters import openenv, serving
from g2po_envs.adapters.openenv import RemoteEnvironment, read_observation
from g2po_trl import Observation, StepResult, TextEnvironment, check_environment
from g2po_trl.cli.commands.serve import main
from g2po_trl.environments.loading import load
from g2po_trl.environments.validation import validate_observation
from g2po_trl.prompts.conversation import ChatRequest
from g2po_trl.utils.images import as_picture

HELPERS = Path(__file__).parents[1] / "helpers"
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module", autouse=True)
def without_gradio():
    """Here, in the workers and in the servers, which get this `sys.path`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HELPERS / "stubs")
        yield


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
def server(without_gradio):
    with started() as (_, url):
        yield url


def test_a_remote_environment_plays_as_the_local_one(server):
    remote, local = RemoteEnvironment([server]), KeyDoorEnvironment()
    for room, actions in KEY_DOOR_WALKTHROUGHS.items():
        assert remote.reset(key_room=room) == local.reset(key_room=room)
        assert all(remote.step(action) == local.step(action) for action in ["nonsense", *actions])
    remote.close()
    check_environment(load(server), {"key_room": "hall"})


@contextmanager
def session_of(environment, **options):
    """What plays for one client of the server."""
    made = []

    def create(served, *rest, **more):
        made.append(served)
        return SimpleNamespace(add_middleware=lambda *one, **other: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openenv.core.env_server.http_server.create_fastapi_app", create)
        serving.make_app(environment, **options)
    session = made[0]()
    yield session
    session.close()


def remote_with(client):
    remote = RemoteEnvironment([NOWHERE])
    remote._client = client
    return remote


def test_an_environment_that_dies_on_the_server_is_an_error():
    with session_of(FaultyEnvironment) as session:
        session.reset()
        with pytest.raises(RuntimeError):
            session.step(SimpleNamespace(text="exit 1"))
        assert session.reset(seed=None, number=2).text == "number 2"


class Ends(TextEnvironment):
    def __init__(self, truncates, terminates):
        self.end = StepResult("end", 10.0, terminates, truncates)

    def reset(self):
        return "begin"

    def step(self, action):
        return self.end


@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, True)])
def test_the_end_of_a_remote_episode_is_the_environments(ends):
    """Truncated and terminated is a success here if it was paid, and so it is by a server."""
    with session_of(partial(Ends, *ends)) as session:
        session.reset()
        said = session.step(SimpleNamespace(text="go"))
    fields = said.model_dump(exclude={"reward", "done", "metadata"})
    result = remote_with(SimpleNamespace(step=lambda action: Answer(fields, said.reward, said.done))).step("go")
    assert (result.truncated, result.terminated, result.reward) == (*ends, 10.0)


def test_requests_of_web_pages_are_refused(server):
    """A page that is open in a browser on the server's machine, also one that has its name mean this machine."""
    address = server.replace("http", "ws") + "/ws"
    for page in ({"origin": "http://evil.example"}, {"origin": server}):
        with pytest.raises(InvalidStatus):
            connect(address, **page)
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2]))) as renamed:
        with pytest.raises(InvalidStatus):
            connect("ws://evil.example/ws", sock=renamed)
    with connect(address) as client:
        client.send(json.dumps({"type": "reset", "data": {"key_room": "hall"}}))
        assert "You wake up" in client.recv()
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        request = urllib.request.Request(f"{server}/reset", b"{}", {"Content-Type": "application/json", **headers})
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request)


class TellsASecret(TextEnvironment):
    def reset(self):
        return os.environ.get("GAME_TOKEN", "none")


def test_a_served_environment_gets_the_variables_that_are_named(monkeypatch):
    with refused("environment_variables"):
        main(["toy_environments:KeyDoorEnvironment", "--environment_variables", "NOT_SET"])
    monkeypatch.setenv("GAME_TOKEN", "sesame")
    for names, seen in (([], "none"), (["GAME_TOKEN"], "sesame")):
        with session_of(TellsASecret, environment_variables=names) as session:
            assert session.reset().text == seen


def test_a_tool_based_class_is_served_as_the_trainer_wraps_it():
    with refused("max_turns"):
        main(["tools_by_hand:Safe"])
    with session_of(Safe, max_turns=2) as session:
        told = session.reset(code="12", prompt="Open it.")
        assert told.text == "The safe is locked." and "turn" in told.task and told.task.endswith("Open it.")
        turn = '<tool_call>{"name": "turn", "arguments": {"digit": %d}}</tool_call>'
        seen = [session.step(SimpleNamespace(text=turn % digit)) for digit in (1, 2)]
    assert [(one.text, one.reward, one.done) for one in seen] == [("click", 0.0, False), ("click", 10.0, True)]


def test_a_connection_that_ended_between_episodes_is_made_again(monkeypatch):
    """Servers and proxies close idle ones, e.g. during a long update."""

    def connected(remote):
        reset = Mock(side_effect=[Answer({"text": "x"}, 0.0, False), ConnectionError("closed while idle")])
        remote._url, remote._client = NOWHERE, SimpleNamespace(reset=reset, close=lambda: None)

    monkeypatch.setattr(RemoteEnvironment, "_connect", connected)
    remote = RemoteEnvironment([NOWHERE])
    assert [remote.reset().text for _ in range(3)] == ["x"] * 3


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
        with pytest.raises(ConnectionError):
            RemoteEnvironment([full]).reset(key_room="hall")
        process.kill()
        for call in (partial(only.step, "take key"), partial(only.reset, key_room="hall")):
            with pytest.raises(ConnectionError):
                call()
        only.base_urls.append(server)
        assert isinstance(only.reset(key_room="hall"), Observation), "the other server takes it"
        for one in (only, other):
            one.close()


def test_images_travel_with_observations_and_with_messages(tmp_path):
    picture = as_picture(drawing(1))
    shown = [{"type": "text", "text": "see"}, {"type": "image", "image": picture}, {"type": "text", "text": "there"}]
    asked = ChatRequest([{"role": "system", "content": "look"}, {"role": "user", "content": shown}], stop=("x",))
    for seen in (Observation("a", images=[picture]), Observation("a", request=asked)):
        seen = validate_observation(seen, "reset")
        received = read_observation(json.loads(json.dumps(serving._as_json(seen))))
        assert seen.images == (picture,) and validate_observation(received, "reset") == seen
    (tmp_path / "here.png").write_bytes(picture.png)
    with refused("images"):
        read_observation({"text": "a", "admissible_actions": None, "images": [str(tmp_path / "here.png")]})


def test_what_other_servers_say():
    assert read_observation({"text": "t", "admissible_actions": ["a"], "done": 1}) == Observation("t", None, ["a"])
    rainy = SimpleNamespace(step=lambda action: Answer({"text": "x", "info": "it rains"}, 1.0, True))
    assert remote_with(rainy).step("look") == StepResult(Observation("x"), 1.0, terminated=True)
    with refused("read_observation"):
        read_observation({"board": [1], "goal": "Win."})
    with refused("base_urls"):
        RemoteEnvironment("http://127.0.0.1:8000")
