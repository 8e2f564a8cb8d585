"""A server of ours over loopback plays as in process does; one that is cut off costs an episode, not the run."""

import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

pytest.importorskip("openenv")

from refusals import refused
from tools_by_hand import Safe
from toy_environments import KEY_DOOR_WALKTHROUGHS, KeyDoorEnvironment
from vision_models import drawing

from g2po_envs.adapters import openenv, serving
from g2po_envs.adapters.openenv import RemoteEnvironment, read_observation
from g2po_envs.adapters.serving import make_app
from g2po_trl import (
    EnvironmentPool,
    Observation,
    PoolLimits,
    StepResult,
    TextEnvironment,
    check_environment,
)
from g2po_trl.cli.commands.serve import main
from g2po_trl.environments.loading import load
from g2po_trl.environments.validation import validate_observation
from g2po_trl.prompts.conversation import ChatRequest
from g2po_trl.utils.images import as_picture

TESTS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module", autouse=True)
def without_gradio():
    """Here, in the workers and in the servers, which get this `sys.path`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS / "stubs")
        yield


def start_server(name, port=None, options=()):
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    process = programs.start("-m", "g2po_trl", "serve", name, "--port", port, *options, cwd=TESTS, stdout="/dev/null")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}"
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


def stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(without_gradio):
    process, url = start_server("toy_environments.py:KeyDoorEnvironment")
    yield url
    stop(process)


def play(environment, room, actions):
    seen = [environment.reset(key_room=room)]
    results = [environment.step(action) for action in actions]
    return seen + [(r.observation, r.reward, r.terminated, r.truncated) for r in results]


def test_remote_environment_plays_as_the_local_one(server):
    remote, local = RemoteEnvironment([server]), KeyDoorEnvironment()
    for room, actions in KEY_DOOR_WALKTHROUGHS.items():
        actions = ["nonsense", *actions]
        assert play(remote, room, actions) == play(local, room, actions)
    remote.close()


def test_check_environment_of_a_server_address_passes(server):
    check_environment(load(server), {"key_room": "hall"})


def test_pool_of_remote_environments_plays_many_episodes_at_a_time(server):
    rooms = [*KEY_DOOR_WALKTHROUGHS] * 2
    with EnvironmentPool(partial(RemoteEnvironment, [server]), PoolLimits(2)) as pool:
        first = pool.reset([{"key_room": room} for room in rooms])
        assert all(isinstance(observation, Observation) for observation in first)
        played = pool.step(dict.fromkeys(range(len(rooms)), "take key"))
        found = ["You take the key" in played[slot].observation.text for slot in range(len(rooms))]
        assert found == [room == "hall" for room in rooms]


def session_of(monkeypatch, environment, **options):
    """What plays for one client of the server."""
    made = []

    def create(served, *rest, **more):
        made.append(served)
        return SimpleNamespace(add_middleware=lambda *one, **other: None)

    monkeypatch.setattr("openenv.core.env_server.http_server.create_fastapi_app", create)
    make_app(environment, **options)
    return made[0]()


class Dies(TextEnvironment):
    def reset(self, **task):
        return "alive"

    def step(self, action):
        os._exit(1)


def test_environment_that_dies_on_the_server_is_an_error(monkeypatch):
    session = session_of(monkeypatch, Dies)
    session.reset()
    with pytest.raises(RuntimeError):
        session.step(SimpleNamespace(text="a"))
    assert session.reset(seed=2).text == "alive"
    session.close()


@pytest.mark.parametrize(("truncates", "terminates"), [(True, True), (True, False), (False, True)])
def test_end_of_a_remote_episode_is_the_environments(monkeypatch, truncates, terminates):
    """Truncated and terminated is a success here if it was paid, and so it is by a server."""
    from openenv.core.client_types import StepResult as Answer

    class Ends(TextEnvironment):
        def reset(self):
            return "begin"

        def step(self, action):
            return StepResult("end", 10.0, terminates, truncates)

    session = session_of(monkeypatch, Ends)
    session.reset()
    said = session.step(SimpleNamespace(text="go"))
    session.close()
    remote = RemoteEnvironment(["http://127.0.0.1:1"])
    fields = said.model_dump(exclude={"reward", "done", "metadata"})
    remote._client = SimpleNamespace(step=lambda action: Answer(fields, said.reward, said.done))
    result = remote.step("go")
    assert (result.terminated, result.truncated, result.reward) == (terminates, truncates, 10.0)


def test_requests_of_web_pages_are_refused(server):
    """A page that is open in a browser on the server's machine, also one that has its name mean this machine."""
    import json
    import urllib.error
    import urllib.request

    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    address = server.replace("http", "ws") + "/ws"
    reset = json.dumps({"type": "reset", "data": {"key_room": "hall"}})
    for page in ({"origin": "http://evil.example"}, {"origin": server}):
        with pytest.raises(InvalidStatus):
            connect(address, **page)
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2]))) as renamed:
        with pytest.raises(InvalidStatus):
            connect("ws://evil.example/ws", sock=renamed)
    with connect(address) as client:
        client.send(reset)
        assert "You wake up" in client.recv()
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        request = urllib.request.Request(f"{server}/reset", b"{}", {"Content-Type": "application/json", **headers})
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request)


class TellsASecret(TextEnvironment):
    def reset(self):
        return os.environ.get("GAME_TOKEN", "none")


def test_served_environment_gets_the_variables_that_are_named(monkeypatch):
    with refused("environment_variables"):
        main(["toy_environments:KeyDoorEnvironment", "--environment_variables", "NOT_SET"])
    monkeypatch.setenv("GAME_TOKEN", "sesame")
    for names, seen in (([], "none"), (["GAME_TOKEN"], "sesame")):
        session = session_of(monkeypatch, TellsASecret, environment_variables=names)
        assert session.reset().text == seen
        session.close()


def test_tool_based_class_is_served_as_the_trainer_wraps_it(monkeypatch):
    with refused("max_turns"):
        main(["tools_by_hand:Safe"])
    session = session_of(monkeypatch, Safe, max_turns=2)
    told = session.reset(code="12", prompt="Open it.")
    assert told.text == "The safe is locked." and "turn" in told.task and told.task.endswith("Open it.")
    turn = '<tool_call>{"name": "turn", "arguments": {"digit": %d}}</tool_call>'
    seen = [session.step(SimpleNamespace(text=turn % digit)) for digit in (1, 2)]
    assert [(one.text, one.reward, one.done) for one in seen] == [("click", 0.0, False), ("click", 10.0, True)]
    session.close()


def test_info_of_a_server_that_is_a_text_is_ignored():
    from openenv.core.client_types import StepResult as Answer

    remote = RemoteEnvironment(["http://127.0.0.1:1"])
    remote._client = SimpleNamespace(step=lambda action: Answer({"text": "x", "info": "it rains"}, 1.0, True))
    assert remote.step("look") == StepResult(Observation("x"), 1.0, terminated=True)


def test_a_connection_that_ended_between_episodes_is_made_again(monkeypatch):
    """Servers and proxies close idle ones, e.g. during a long update."""
    from openenv.core.client_types import StepResult as Answer

    class Client:
        used = False

        def reset(self):
            if self.used:
                raise ConnectionError("closed while idle")
            self.used = True
            return Answer({"text": "x"}, 0.0, False)

        def close(self):
            pass

    def connect(remote):
        remote._url, remote._client = remote.base_urls[0], Client()

    monkeypatch.setattr(RemoteEnvironment, "_connect", connect)
    remote = RemoteEnvironment(["http://127.0.0.1:1"])
    assert [remote.reset().text for _ in range(3)] == ["x"] * 3


def test_a_full_server_is_passed_over_and_a_killed_one_fails_its_own_episodes(server, monkeypatch):
    process, full = start_server("toy_environments.py:KeyDoorEnvironment", options=["--max_sessions", "1"])
    try:
        only = RemoteEnvironment([full], timeout=20)
        only.reset(key_room="hall")
        monkeypatch.setattr(openenv, "_SESSIONS", Counter())  # another worker does not know of this session
        other = RemoteEnvironment([full, server])
        other.reset(key_room="hall")
        assert other._url == server
        with pytest.raises(ConnectionError):
            RemoteEnvironment([full]).reset(key_room="hall")
        with pytest.raises(RuntimeError):
            other.reset(key_room="hall", no_such_column=1)
        process.kill()
        process.wait()
        with pytest.raises(ConnectionError):
            only.step("take key")
        with pytest.raises(ConnectionError):
            only.reset(key_room="hall")
        only.base_urls.append(server)
        assert isinstance(only.reset(key_room="hall"), Observation), "the other server takes it"
        for one in (only, other):
            one.close()
    finally:
        if process.poll() is None:
            stop(process)


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
    with refused("read_observation"):
        read_observation({"board": [1], "goal": "Win."})
    with refused("base_urls"):
        RemoteEnvironment("http://127.0.0.1:8000")
