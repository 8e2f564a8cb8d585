"""Who caused an exception: the model, which broke its shell, or the environment, whose service is down."""

import asyncio
import socket
import subprocess
import threading
import urllib.request

import pytest
from scripted_agents import calls

from g2po_trl.environments.causes import BrokenEnvironmentError, has_gone, in_words, is_of_environment
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure, EnvironmentPool
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment, ToolEnvironment


def raised(function):
    """Return the exception that a function raises, with its traceback."""
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def answers(raw, function):
    """Call a function with the port of a service that answers one request so; `None`: it does not answer."""

    def serve(server):
        with server.accept()[0] as connection:
            connection.recv(65_536)
            connection.sendall(raw)

    with socket.create_server(("127.0.0.1", 0)) as server:
        if raw is not None:
            threading.Thread(target=serve, args=(server,), daemon=True).start()
        return function(server.getsockname()[1])


def status(number, function):
    return answers(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" % number, function)


def dead_shell():
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as process:
        process.wait()
        process.stdin.write(b"x")
        process.stdin.flush()


def by_urllib(port):
    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=0.05)


def by_requests(port, host="127.0.0.1"):
    pytest.importorskip("requests").get(f"http://{host}:{port}", proxies={"http": ""}).raise_for_status()


def by_httpx(port, host="127.0.0.1"):
    pytest.importorskip("httpx").get(f"http://{host}:{port}", trust_env=False, timeout=0.5).raise_for_status()


def by_openai(port):
    openai = pytest.importorskip("openai")
    client = openai.DefaultHttpxClient(trust_env=False)
    openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key="x", max_retries=0, http_client=client).models.list()


def by_web_socket(port):
    pytest.importorskip("websocket").create_connection(f"ws://127.0.0.1:{port}")


def unknown_host(ask):
    """Ask for a page of a host whose name nobody knows, as a model makes them up."""

    def find(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", find)
        ask(80, "nosuch.invalid")


MODELS = {
    "exit in its shell": dead_shell,
    "a closed file": lambda: exec("file = open('/dev/null'); file.close(); file.read()"),
    "an end of a file": lambda: exec("raise EOFError"),
    "pexpect": lambda: pytest.importorskip("pexpect").spawn("true").expect("never", timeout=5),
    "a command that takes too long": lambda: subprocess.run(["sleep", "9"], timeout=0.01),
    "requests: a host that is none": lambda: unknown_host(by_requests),
    "httpx: a host that is none": lambda: unknown_host(by_httpx),
    "a page that is none": lambda: status(404, by_requests),
    "its own cause": lambda: exec("error = KeyError(); error.__cause__ = error; raise error"),
}
GONE = list(MODELS)[:4]
ENVIRONMENTS = {
    "a service fails": lambda: status(500, by_requests),
    "a service is overloaded": lambda: status(529, by_requests),
    "a service is down": lambda: socket.create_connection(("127.0.0.1", closed_port())),
    "urllib": lambda: by_urllib(closed_port()),
    "httpx": lambda: by_httpx(closed_port()),
    "httpx waits": lambda: answers(None, by_httpx),
    "requests, cut off": lambda: answers(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", by_requests),
    "a judge that is overloaded": lambda: status(429, by_openai),
    "a web socket": lambda: answers(b"", by_web_socket),
    "its own word": lambda: (_ for _ in ()).throw(BrokenEnvironmentError("x")),
    "a group": lambda: exec("raise ExceptionGroup('a', [ExceptionGroup('b', [KeyError(), ConnectionResetError()])])"),
}


@pytest.mark.parametrize("case", [*MODELS, *ENVIRONMENTS])
def test_who_caused_an_exception(case):
    error = raised({**MODELS, **ENVIRONMENTS}[case])
    for wrapped in (True, False):
        assert is_of_environment(error, wrapped) == (case in ENVIRONMENTS), repr(error)
    assert has_gone(error) == (case in GONE), repr(error)


@pytest.mark.parametrize("case", ["urllib", "a service is overloaded"])
def test_an_exception_that_is_raised_in_place_of_another(case):
    error = ValueError("there is no such page")
    error.__cause__ = raised(ENVIRONMENTS[case])
    assert is_of_environment(error) and not is_of_environment(error, wrapped=False), "the tool tells the model"
    assert in_words(error) == "ValueError: there is no such page"


class Shell:
    """A shell that the reward looks into, too."""

    def reset(self, **row):
        self.shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def run(self, command: str) -> str:
        self.shell.stdin.write(f"{command}\necho END\n")
        self.shell.stdin.flush()
        return "".join(iter(lambda: self.shell.stdout.readline().replace("END\n", ""), ""))

    async def fetch(self) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.open_connection("127.0.0.1", closed_port()))

    async def find(self) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread({}.pop, "page"))

    def get_reward(self) -> float:
        return float(self.run("echo paid") == "paid\n")


@pytest.mark.parametrize("command", ["exit", "kill $$", "exec true"])
def test_exit_in_a_shell_is_seen_and_is_a_failure(command):
    shell = ChatToolEnvironment(Shell, 9, tool_schemas="")
    shell.reset(prompt="Use the shell.")
    assert shell.step(calls(("run", {"command": "echo hi"}))).observation.text == "tool: hi\n"
    shell.step(calls(("run", {"command": command})))
    shell.inner.shell.wait()
    assert "Broken pipe" in shell.step(calls(("run", {"command": "ls"}))).observation.text
    end = shell.step("done")
    assert (end.reward, end.terminated, end.info["success"]) == (0, True, False)
    assert end.info["failure_reason"].startswith("environment broken: get_reward raised BrokenPipeError")
    shell.close()


def test_a_group_of_a_tool_is_named_and_a_service_that_is_down_is_an_error():
    shell = ToolEnvironment(Shell, 9, tool_schemas="")
    shell.reset(prompt="x")
    assert (
        shell.step('<tool_call>{"name": "find", "arguments": {}}</tool_call>').observation.text
        == "{'error': \"'page'\"}"
    )
    shell.inner.shell.kill()
    shell.close()
    with EnvironmentPool(lambda: ChatToolEnvironment(Shell, 9, tool_schemas=""), PoolLimits(1)) as pool:
        pool.reset([{"prompt": "x"}])
        failure = pool.step({0: calls(("fetch", {}))})[0]
    assert isinstance(failure, EnvironmentFailure) and "\nConnectionRefusedError: " in failure.message
