"""Agents that are programs, in any language.

AgentCommand("python solve.py --question={question}", verify=lambda task, stdout: task["answer"] in stdout)
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...utils.errors import G2POError
from ...utils.json import to_json
from ...utils.show import describe_exit
from .agent import AgentClient, CommandError, result_of
from .endpoint import bypass_proxies

_VERIFIED = ("task", "stdout", "stderr", "returncode", "folder")
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
_SUPERVISOR = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
MIN_WAIT = 0.1  # seconds between looks at a program's own time
END_SECONDS = 5.0  # for all that a program started to end
MAX_OUTPUT_BYTES = 2**20  # of stdout, and of stderr; more loses its middle


class AgentCommand:
    """An agent that is a program, for `AgentEnvironment` or `G2POTrainer(agent=…)`.

    The program finds the model in the variables `OPENAI_BASE_URL` (also as `OPENAI_API_BASE`), `OPENAI_API_KEY` and
    `OPENAI_MODEL`. It runs in the folder in which the training was started. `EPISODE_FOLDER` is an empty folder of the
    episode, removed after it: write files there, since episodes play at the same time. `python` is the Python that
    runs the training, unless another one comes first in `PATH`.

    All that the program starts ends with it, daemons too (`supervisor`; outside of Linux, only its process group). Its
    key is valid during the episode alone; other programs of the same user can read it meanwhile.

    Args:
        command: the program and its arguments, as in a shell, or as a list. `{column}` is replaced by the task's
            value; `{{` is a brace. No shell runs, and a value is always (part of) one argument. Write
            `--question={question}` or `-- {question}`, else a value that begins with `-` is read as an option.
        verify: required; function, sync or async, that returns the reward, or anything else an agent may return. It
            takes those of `task`, `stdout`, `stderr`, `returncode` and `folder` (of the episode) that its parameters
            name. If `returncode` is not among them, another exit status than 0 is an exception of the agent. Output
            beyond a megabyte loses its middle.
        environment: further environment variables.
        timeout: seconds that the program may take, without the time in which it waits for the model. After them it is
            killed, and the episode is a failure. `None`: the pool's `step_timeout` ends its worker, and the episode is
            an error.

    Raises:
        G2POError: if the command is empty or has a placeholder that is no name, or `verify` cannot be called.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        verify: Callable[..., Any] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ):
        try:
            self.words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
            for _, column, form, conversion in string.Formatter().parse("\n".join(self.words)):
                if column is not None and (not column.isidentifier() or form or conversion):
                    raise ValueError(f"{{{column}}} is not the name of a column")
        except ValueError as error:
            raise G2POError(
                f"command is {command!r} ({error}): quote as in a shell, write {{column}}, and {{{{ for a brace"
            ) from error
        if not self.words:
            raise G2POError(f"command is {command!r}: give a program and its arguments")
        if not callable(verify):
            raise G2POError(f"verify is {verify!r}: pass a function that returns the reward, e.g. of (task, stdout)")
        if timeout is not None and not timeout > 0:
            raise G2POError(f"timeout is {timeout}: set it above 0")
        self.verify, self._verified = verify, _verified(verify)
        self.environment = {name: str(value) for name, value in (environment or {}).items()}
        self.timeout = timeout

    def __call__(self, task: dict[str, Any], client: AgentClient) -> Any:
        """Run the program and return what `verify` returns.

        Raises:
            CommandError: if the program fails or takes too long.
            G2POError: if a placeholder is no column of the task.
        """
        words = [_filled(word, task) for word in self.words]
        with tempfile.TemporaryDirectory(prefix="episode-", ignore_cleanup_errors=True) as folder:
            returncode, stdout, stderr = self._run(words, self._variables(client, folder), client)
            if returncode != 0 and "returncode" not in self._verified:
                raise CommandError(_failed(returncode, stderr))
            values = dict(zip(_VERIFIED, [task, stdout, stderr, returncode, Path(folder)]))
            return result_of(self.verify(**{name: values[name] for name in self._verified}))

    def _run(self, words: list[str], variables: dict[str, str], client: AgentClient) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr of a program."""
        if shutil.which(words[0], path=variables["PATH"]) is None:
            raise FileNotFoundError(
                f"{words[0]} is not found: give the program's path, or install it where training runs"
            )
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = subprocess.Popen([*_SUPERVISOR, *words], **pipes, env=variables, process_group=0)
        outputs = [_Output(program.stdout), _Output(program.stderr)]
        try:
            client.at_end(lambda: _end(program))
            while True:
                left = None if self.timeout is None else self.timeout - client.session.own_seconds()
                if left is not None and left <= 0:
                    raise CommandError(f"it took more than {self.timeout:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(None if left is None else max(left, MIN_WAIT))
                    return program.returncode, *(output.text() for output in outputs)
        finally:
            _end(program)

    def _variables(self, client: AgentClient, folder: str) -> dict[str, str]:
        variables = dict(os.environ)
        bypass_proxies(variables)
        own = str(Path(sys.executable).parent)
        path = variables.get("PATH", os.defpath)
        if own not in path.split(os.pathsep):
            path = f"{own}{os.pathsep}{path}"
        return {
            **variables,
            "PATH": path,
            "OPENAI_BASE_URL": client.base_url,
            "OPENAI_API_BASE": client.base_url,
            "OPENAI_API_KEY": client.api_key,
            "OPENAI_MODEL": client.model,
            "EPISODE_FOLDER": folder,
            **self.environment,
        }


def _filled(word: str, task: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else to_json(value) for name, value in task.items()}
    try:  # no argument can contain a zero or a lone surrogate
        return word.format_map(texts).replace("\0", "").encode("utf-8", "replace").decode("utf-8")
    except KeyError as error:
        raise G2POError(
            f"command has {{{error.args[0]}}}, and the task's columns are {', '.join(task)}: rename the placeholder"
        ) from error


def _verified(verify: Callable[..., Any]) -> list[str]:
    """Return the names of what `verify` takes. Raises `G2POError` if it takes something else."""
    parameters = inspect.signature(verify).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(_VERIFIED)
    wanted = [p.name for p in parameters if p.name in _VERIFIED or p.default is p.empty]
    if unknown := [name for name in wanted if name not in _VERIFIED]:
        raise G2POError(f"verify takes {', '.join(unknown)}: it gets those of {', '.join(_VERIFIED)} that it names")
    return wanted


def _failed(returncode: int, stderr: str) -> str:
    """Return how a program failed, and the line of stderr that says why: the last error, else the last line."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if _ERROR_LINE.match(line)]  # Node writes its version after them
    return ": ".join([describe_exit(returncode), *(errors or lines)[-1:]])


def _end(program: subprocess.Popen) -> None:
    """End a program and all that it started."""
    program.terminate()
    try:
        program.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
    program.stdin.close()


class _Output:
    """Reads what a program writes, and keeps its beginning and end."""

    def __init__(self, pipe: Any):
        self._head, self._tail, self._omitted = bytearray(), bytearray(), 0
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: Any) -> None:
        half = MAX_OUTPUT_BYTES // 2
        with pipe:
            while chunk := pipe.read1(2**16):
                room = half - len(self._head)
                self._head += chunk[:room]
                self._tail += chunk[room:]
                if (surplus := len(self._tail) - half) > half:
                    del self._tail[:surplus]
                    self._omitted += surplus

    def text(self) -> str:
        """Return the text. All writers have ended, but outside of Linux a daemon may live: it is not waited for."""
        self._thread.join(1.0)
        omitted = f"\n[{self._omitted:,} bytes are left out]\n".encode() if self._omitted else b""
        return (bytes(self._head) + omitted + bytes(self._tail)).decode("utf-8", "replace")
