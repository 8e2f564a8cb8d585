"""Who caused an exception: the model, which broke its shell, or the environment, whose service is down."""

import asyncio
import socket
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from g2po_trl.environments.causes import has_gone, in_words, is_of_environment
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure, EnvironmentPool
from g2po_trl.environments.tools.trl_tools import BrokenEnvironmentError, ChatToolEnvironment, ToolEnvironment
from g2po_trl.prompts.conversation import ChatResponse


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


def silent(function):
    """Call a function with the port of a service that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return function(server.getsockname()[1])


def dead_shell(text=b"x"):
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as process:
        process.wait()
        process.stdin.write(text)
        process.stdin.flush()


def closed_file():
    with open(__file__) as file:
        pass
    file.read()


def slow_service(port):
    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=0.05)


def answers(raw, function):
    """Call a function with the port of a service that answers one request so."""

    def serve(server):
        with server.accept()[0] as connection:
            connection.recv(65_536)
            connection.sendall(raw)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        return function(server.getsockname()[1])


def status(number):
    return b"HTTP/1.1 %d X\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" % number


def fetch(port, library="requests"):
    """Get a page, and raise for its status."""
    if library == "requests":
        session = pytest.importorskip("requests").Session()
        session.trust_env = False
        session.get(f"http://127.0.0.1:{port}").raise_for_status()
    else:
        httpx_get(port).raise_for_status()


def unknown_host(library):
    """Ask for a page of a host whose name nobody knows, as a model makes them up."""

    def find(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", find)
        options = {"trust_env": False} if library == "httpx" else {"proxies": {"http": ""}}
        pytest.importorskip(library).get("http://nosuch.invalid", **options)


def ask_judge(number):
    openai = pytest.importorskip("openai")

    def ask(port):
        http_client = openai.DefaultHttpxClient(trust_env=False)
        url = f"http://127.0.0.1:{port}/v1"
        openai.OpenAI(base_url=url, api_key="x", max_retries=0, http_client=http_client).models.list()

    answers(status(number), ask)


def closed_web_socket(port):
    pytest.importorskip("websocket").create_connection(f"ws://127.0.0.1:{port}")


def end_of_pexpect():
    pytest.importorskip("pexpect").spawn("true").expect("never", timeout=5)


def httpx_get(port, **options):
    return pytest.importorskip("httpx").get(f"http://127.0.0.1:{port}", trust_env=False, **options)


MODELS = {
    "exit in its shell": dead_shell,
    "a closed file": closed_file,
    "a command that fails": lambda: subprocess.run(["false"], check=True),
    "a command that takes too long": lambda: subprocess.run(["sleep", "9"], timeout=0.01),
    "an end of a file": lambda: exec("raise EOFError"),
    "an address that is none": lambda: urllib.request.urlopen("nothing://"),
    "requests: a host that is none": lambda: unknown_host("requests"),
    "httpx: a host that is none": lambda: unknown_host("httpx"),
    "a page that is none": lambda: answers(status(404), fetch),
    "what a service cannot do": lambda: answers(status(500), fetch),
    "pexpect": end_of_pexpect,
    "a protocol that is none": lambda: pytest.importorskip("httpx").get("nothing://x"),
}
ENVIRONMENTS = {
    "a service is down": lambda: socket.create_connection(("127.0.0.1", closed_port())),
    "urllib": lambda: urllib.request.urlopen(f"http://127.0.0.1:{closed_port()}"),
    "httpx": lambda: httpx_get(closed_port()),
    "httpx waits": lambda: silent(lambda port: httpx_get(port, timeout=0.05)),
    "urllib waits": lambda: silent(slow_service),
    "requests, cut off": lambda: answers(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", fetch),
    "a service that is overloaded": lambda: answers(status(503), fetch),
    "httpx: too many requests": lambda: answers(status(429), lambda port: fetch(port, "httpx")),
    "a judge that is overloaded": lambda: ask_judge(429),
    "a web socket": lambda: answers(b"", closed_web_socket),
    "its own word": lambda: (_ for _ in ()).throw(BrokenEnvironmentError("x")),
    "a group": lambda: exec("raise ExceptionGroup('a', [ExceptionGroup('b', [KeyError(), ConnectionResetError()])])"),
}


@pytest.mark.parametrize("case", MODELS)
def test_what_the_model_broke(case):
    error = raised(MODELS[case])
    assert not is_of_environment(error) and not is_of_environment(error, wrapped=False), repr(error)


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_what_the_environment_failed_in(case):
    error = raised(ENVIRONMENTS[case])
    assert is_of_environment(error) and is_of_environment(error, wrapped=False), repr(error)


def test_an_exception_that_is_raised_in_place_of_another():
    def translated():
        try:
            ENVIRONMENTS["urllib"]()
        except urllib.error.URLError as error:
            raise ValueError("there is no such page") from error

    error = raised(translated)
    assert is_of_environment(error) and not is_of_environment(error, wrapped=False), "the tool tells the model"
    assert in_words(error) == "ValueError: there is no such page"


def test_what_has_gone():
    for case in ("exit in its shell", "a closed file", "an end of a file", "pexpect"):
        assert has_gone(raised(MODELS[case])), case
    for error in (*map(raised, ENVIRONMENTS.values()), KeyError("x"), FileNotFoundError(2, "x")):
        assert not has_gone(error), repr(error)


class Shell:
    """A shell that the reward looks into, too."""

    def reset(self, **row):
        self.shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def run(self, command: str) -> str:
        """Run a command.

        Args:
            command: the command.
        """
        self.shell.stdin.write(f"{command}\necho END\n")
        self.shell.stdin.flush()
        return "".join(iter(lambda: self.shell.stdout.readline().replace("END\n", ""), ""))

    async def fetch(self) -> str:
        """Ask a service that is down."""
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.open_connection("127.0.0.1", closed_port()))

    async def find(self) -> str:
        """Look for a page that is missing."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._missing())

    async def _missing(self):
        raise KeyError("page")

    def get_reward(self) -> float:
        return float(self.run("echo paid") == "paid\n")


def call(name, **arguments):
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return ChatResponse("", (made,), "tool_calls").to_action()


@pytest.mark.parametrize("command", ["exit", "kill $$", "exec true"])
def test_exit_in_a_shell_is_seen_and_is_a_failure(command):
    shell = ChatToolEnvironment(Shell, 9, tool_schemas="")
    shell.reset(prompt="Use the shell.")
    assert shell.step(call("run", command="echo hi")).observation.text == "tool: hi\n"
    shell.step(call("run", command=command))
    shell.inner.shell.wait()
    assert "Broken pipe" in shell.step(call("run", command="ls")).observation.text
    end = shell.step(ChatResponse("done").to_action())
    assert (end.reward, end.terminated, end.info["success"]) == (0, True, False)
    assert end.info["failure_reason"].startswith("environment broken: get_reward raised BrokenPipeError")
    shell.close()


@pytest.mark.parametrize("kind", [ChatToolEnvironment, ToolEnvironment])
def test_a_group_of_a_tool_is_named_and_a_service_that_is_down_is_an_error(kind):
    environment = kind(Shell, 9, tool_schemas="")
    environment.reset(prompt="x")
    find = call("find") if kind is ChatToolEnvironment else '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    seen = environment.step(find).observation
    assert "page" in getattr(seen, "text", seen) and "TaskGroup" not in getattr(seen, "text", seen)
    environment.inner.shell.kill()
    environment.close()
    with EnvironmentPool(lambda: ChatToolEnvironment(Shell, 9, tool_schemas=""), PoolLimits(1)) as pool:
        pool.reset([{"prompt": "x"}])
        failure = pool.step({0: call("fetch")})[0]
    assert isinstance(failure, EnvironmentFailure) and "\nConnectionRefusedError: " in failure.message
