"""Agents that are programs, in any language.

AgentCommand("python solve.py --question={question}", verify=lambda task, stdout: task["answer"] in stdout)
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...utils.show import describe_exit
from .agent import AgentClient, CommandError
from .endpoint import bypass_proxies

_VERIFIED = ("task", "stdout", "stderr", "returncode", "folder")
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
MIN_WAIT = 0.1  # seconds between looks at a program's own time


class AgentCommand:
    """An agent that is a program, for `AgentEnvironment` or `G2POTrainer(agent=…)`.

    The program finds the model in the variables `OPENAI_BASE_URL` (also as `OPENAI_API_BASE`), `OPENAI_API_KEY` and
    `OPENAI_MODEL`. It runs in the folder in which the training was started. `EPISODE_FOLDER` is an empty folder of the
    episode, removed after it: write files there, since episodes play at the same time. `python` is the Python that
    runs the training, unless another one comes first in `PATH`.

    Args:
        command: the program and its arguments, as in a shell, or as a list. `{column}` is replaced by the task's
            value; `{{` is a brace. No shell runs, and a value is always (part of) one argument. Write
            `--question={question}` or `-- {question}`, else a value that begins with `-` is read as an option.
        verify: required; function that returns the reward, or anything else an agent may return. It takes those of
            `task`, `stdout`, `stderr`, `returncode` and `folder` (of the episode) that its parameters name. If
            `returncode` is not among them, another exit status than 0 is an exception of the agent.
        environment: further environment variables.
        timeout: seconds that the program may take, without the time in which it waits for the model. After them it is
            killed, and the episode is a failure. `None`: the pool's `step_timeout` ends its worker, and the episode is
            an error.

    Raises:
        ValueError: if the command is empty or has a placeholder that is no name, or `verify` cannot be called.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        verify: Callable[..., Any] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ):
        self.words = shlex.split(command) if isinstance(command, str) else list(command)
        if not self.words:
            raise ValueError(f"command is {command!r}: give a program and its arguments")
        for word in self.words:
            _placeholders(word)
        if not callable(verify):
            raise ValueError(f"verify is {verify!r}: pass a function that returns the reward, e.g. of (task, stdout)")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout is {timeout}: set it above 0")
        self.verify, self._verified = verify, _verified(verify)
        self.environment, self.timeout = dict(environment or {}), timeout

    def __call__(self, task: dict[str, Any], client: AgentClient) -> Any:
        """Run the program and return what `verify` returns.

        Raises:
            CommandError: if the program fails or takes too long.
            ValueError: if a placeholder is no column of the task.
        """
        words = [_filled(word, task) for word in self.words]
        with tempfile.TemporaryDirectory(prefix="episode-", ignore_cleanup_errors=True) as folder:
            streams = Path(folder)  # files: a process that outlives the program would keep pipes open
            with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
                returncode = self._run(words, self._variables(client, folder), client, stdout, stderr)
                texts = [_text(stdout), _text(stderr)]
            if returncode != 0 and "returncode" not in self._verified:
                raise CommandError(_failed(returncode, texts[1]))
            values = dict(zip(_VERIFIED, [task, *texts, returncode, streams]))
            return self.verify(**{name: values[name] for name in self._verified})

    def _run(self, words: list[str], variables: dict[str, str], client: AgentClient, stdout: Any, stderr: Any) -> int:
        try:
            program = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=variables, process_group=0
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{words[0]} is not found: give the program's path, or install it where training runs"
            ) from error
        try:
            client.at_end(lambda: _kill(program))
            while True:
                left = None if self.timeout is None else self.timeout - client.session.own_seconds()
                if left is not None and left <= 0:
                    _kill(program)
                    program.wait()
                    raise CommandError(f"it took more than {self.timeout:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return program.wait(None if left is None else max(left, MIN_WAIT))
        finally:
            _kill(program)  # what it started and left running

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


def _placeholders(word: str) -> list[tuple[str, str | None]]:
    """Return a word as pairs of a text and the column that follows it. A placeholder must be a name."""
    parts = []
    try:
        for text, column, form, conversion in string.Formatter().parse(word):
            if column is not None and (not column.isidentifier() or form or conversion):
                raise ValueError(f"{{{column}}} is not the name of a column")
            parts.append((text, column))
    except ValueError as error:
        raise ValueError(f"command has {word!r} ({error}): write {{column}}, and {{{{ for a brace") from error
    return parts


def _filled(word: str, task: Mapping[str, Any]) -> str:
    filled = ""
    for text, column in _placeholders(word):
        if column is not None and column not in task:
            raise ValueError(
                f"command has {{{column}}}, and the task's columns are {', '.join(task)}: rename the placeholder"
            )
        value = "" if column is None else task[column]
        filled += text + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return filled.replace("\0", "")  # no argument can contain it


def _verified(verify: Callable[..., Any]) -> list[str]:
    """Return the names of what `verify` takes. Raises `ValueError` if it takes something else."""
    parameters = inspect.signature(verify).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(_VERIFIED)
    wanted = [p.name for p in parameters if p.name in _VERIFIED or p.default is p.empty]
    if unknown := [name for name in wanted if name not in _VERIFIED]:
        raise ValueError(f"verify takes {', '.join(unknown)}: it gets those of {', '.join(_VERIFIED)} that it names")
    return wanted


def _failed(returncode: int, stderr: str) -> str:
    """Return how a program failed, and the line of stderr that says why: the last error, else the last line."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if _ERROR_LINE.match(line)]  # Node writes its version after them
    return ": ".join([describe_exit(returncode), *(errors or lines)[-1:]])


def _kill(program: subprocess.Popen) -> None:
    """Kill a program and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)


def _text(stream: Any) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", "replace")
