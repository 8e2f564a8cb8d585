"""Who caused an exception: the model, which broke its shell, or the environment, whose service is down."""

import errno
import socket
import subprocess
from urllib.error import URLError

import pytest
from scripted_agents import calls

from g2po_trl.environments.causes import BrokenEnvironmentError, has_gone, in_words, is_of_environment
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment

requests, httpx = (pytest.importorskip(name) for name in ("requests", "httpx"))


def of_status(number):
    """Return what `requests` raises for an answer with this status."""
    response = requests.Response()
    response.status_code = number
    return requests.HTTPError(response=response)


def in_place_of(cause, error):
    error.__cause__ = cause
    return error


EndOfPexpect = type("EOF", (Exception,), {"__module__": "pexpect.exceptions"})  # which is not installed everywhere
ITSELF = KeyError()
GONE = [BrokenPipeError(), EOFError(), ValueError("I/O operation on closed file."), EndOfPexpect()]
MODELS = [
    *GONE,
    subprocess.TimeoutExpired("sleep 9", 1),
    in_place_of(socket.gaierror(socket.EAI_NONAME, "x"), requests.ConnectionError()),  # a host that the model made up
    of_status(404),
    in_place_of(ITSELF, ITSELF),
]
ENVIRONMENTS = [
    of_status(500),
    of_status(429),
    *(ConnectionRefusedError(), socket.gaierror(socket.EAI_AGAIN, "x")),
    *(URLError(one) for one in (ConnectionRefusedError(), OSError(errno.ENETUNREACH, "x"))),
    *(httpx.ConnectError("refused"), httpx.ReadTimeout("it waited")),
    requests.exceptions.ChunkedEncodingError(),
    BrokenEnvironmentError("x"),
    ExceptionGroup("a", [ExceptionGroup("b", [KeyError(), ConnectionResetError()])]),
]


@pytest.mark.parametrize("error", [*MODELS, *ENVIRONMENTS], ids=repr)
def test_who_caused_an_exception(error):
    for wrapped in (True, False):
        assert is_of_environment(error, wrapped) == (error in ENVIRONMENTS)
    assert has_gone(error) == (error in GONE)


def test_an_exception_that_is_raised_in_place_of_another():
    error = in_place_of(ConnectionRefusedError(), ValueError("there is no such page"))
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

    def get_reward(self) -> float:
        return float(self.run("echo paid") == "paid\n")


def test_exit_in_a_shell_is_seen_and_is_a_failure():
    shell = ChatToolEnvironment(Shell, 9, tool_schemas="")
    shell.reset(prompt="Use the shell.")
    assert shell.step(calls(("run", {"command": "echo hi"}))).observation.text == "tool: hi\n"
    shell.step(calls(("run", {"command": "exit"})))
    shell.inner.shell.wait()
    assert "Broken pipe" in shell.step(calls(("run", {"command": "ls"}))).observation.text
    end = shell.step("done")
    assert (end.reward, end.terminated, end.info["success"]) == (0, True, False)
    assert end.info["failure_reason"].startswith("environment broken: get_reward raised BrokenPipeError")
    shell.close()
