"""Agents that are programs, in any language.

AgentCommand("python solve.py --question={question}", verify=lambda task, stdout: task["answer"] in stdout)
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
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
from ...utils.options import require
from ...utils.show import describe_exit
from . import supervisor
from .agent import AgentClient, CommandError, read_return_value, result_of
from .endpoint import bypass_proxies
from .workspace import Workspace

_VERIFIED = ("task", "stdout", "stderr", "returncode", "folder")
_VARIABLES = {  # what the model is called in each protocol
    "OPENAI_MODEL": "model",
    "OPENAI_BASE_URL": "base_url",
    "OPENAI_API_BASE": "base_url",
    "OPENAI_API_KEY": "api_key",
    "ANTHROPIC_MODEL": "model",
    "ANTHROPIC_SMALL_FAST_MODEL": "model",
    "ANTHROPIC_BASE_URL": "anthropic_url",
    "ANTHROPIC_API_KEY": "api_key",
}
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
_SUPERVISOR = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
MIN_WAIT = 0.1  # seconds between looks at a program's own time
END_SECONDS = 5.0  # for all that a program started to end
MAX_OUTPUT_BYTES = 2**20  # of stdout, and of stderr; more loses its middle


class AgentCommand:
    """An agent that is a program, for `AgentEnvironment` or `G2POTrainer(agent=…)`.

    The program finds the model in the variables `OPENAI_BASE_URL` (also as `OPENAI_API_BASE`), `OPENAI_API_KEY` and
    `OPENAI_MODEL`, and for Anthropic's protocol in `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `ANTHROPIC_MODEL` and
    `ANTHROPIC_SMALL_FAST_MODEL`. It runs in the folder in which the training was started. `EPISODE_FOLDER` is an empty
    folder of the episode, removed after it: write files there, since episodes play at the same time. `python` is the
    Python that runs the training, unless another one comes first in `PATH`.

    With a `workspace`, it runs in the episode's own copy of that folder, and `HOME` and `TMPDIR` are the episode's.
    The state of a request is the files and the news (`workspace_key`). What it changed is a diff, `info["diff"]`. This
    is no sandbox: the program may read and write all that the user may.

    All that the program starts ends with it, daemons too (`supervisor`; outside of Linux, only its process group). Its
    key is valid during the episode alone; other programs of the same user can read it meanwhile.

    Args:
        command: the program and its arguments, as in a shell, or as a list. `{column}` is replaced by the task's
            value; `{{` is a brace. No shell runs, and a value is always (part of) one argument. Write
            `--question={question}` or `-- {question}`, else a value that begins with `-` is read as an option.
        verify: required; function, sync or async, that returns the reward, or anything else an agent may return. It
            takes those of `task`, `stdout`, `stderr`, `returncode` and `folder` (the workspace, or else of the
            episode) that its parameters name. If `returncode` is not among them, another exit status than 0 is an
            exception of the agent. Output beyond a megabyte loses its middle. With a workspace it may be a command,
            such as `pytest -q`, which runs there after the agent: its reward is the number in its last line, or else
            1 if its exit status is 0, or 0. The agent's exit status does not matter then.
        environment: further environment variables.
        timeout: seconds that the program may take, without the time in which it waits for the model. After them it is
            killed, and the episode is a failure. `None`: the pool's `step_timeout` ends its worker, and the episode is
            an error.
        workspace: folder that the program works on; `{column}` is replaced by the task's value.
        restore: patterns of files that are put back into the workspace before `verify`, such as `tests` or
            `test_*.py`: else a program may be rewarded for changing them.
        verify_timeout: seconds after which a command that verifies is killed, and the reward is 0.
        max_processes: number of processes beyond which a program is killed, and the episode is a failure.
        max_disk_mb: as `max_processes`, of MiB below the episode's folder, workspace included.

    Raises:
        G2POError: if the command is empty or has a placeholder that is no name, or `verify` cannot be called.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        verify: Callable[..., Any] | str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        *,
        workspace: str | Path | None = None,
        restore: Sequence[str] = (),
        verify_timeout: float = 30.0,
        max_processes: int = 256,
        max_disk_mb: float = 1024.0,
    ):
        self.words = _words("command", command)
        self._checks = _words("verify", verify) if isinstance(verify, str) else []
        if not callable(verify) and not self._checks:
            raise G2POError(f"verify is {verify!r}: pass a function that returns the reward, e.g. of (task, stdout)")
        limits = {"timeout": timeout, "verify_timeout": verify_timeout}
        limits |= {"max_processes": max_processes, "max_disk_mb": max_disk_mb}
        for name, limit in limits.items():
            require(limit is None or limit > 0, name, limit, "set it above 0")
        if workspace is None:
            require(not self._checks, "verify", verify, "a command runs in a workspace: give one, or a function")
            require(not restore, "restore", restore, "it puts back files of a workspace: give one")
        else:
            _check_placeholders("workspace", [str(workspace)])
        self.verify, self._verified = verify, [] if self._checks else _verified(verify)
        self.environment = {name: str(value) for name, value in (environment or {}).items()}
        self.timeout, self.verify_timeout = timeout, verify_timeout
        self.workspace, self.restore = workspace, (restore,) if isinstance(restore, str) else tuple(restore)
        self._limits = {"processes": max_processes, "disk_bytes": int(max_disk_mb * 2**20)}

    def __call__(self, task: dict[str, Any], client: AgentClient) -> Any:
        """Run the program and return what `verify` returns.

        Raises:
            CommandError: if the program fails or takes too long.
            G2POError: if a placeholder is no column of the task.
        """
        words = [_filled(word, task) for word in self.words]
        with tempfile.TemporaryDirectory(prefix="episode-", ignore_cleanup_errors=True) as name:
            episode = Path(name)
            if self.workspace is None:
                value, _ = self._play(words, task, client, episode, episode)
                return value
            workspace = Workspace(Path(_filled(str(self.workspace), task)), episode / "workspace")
            client.works_on(workspace)
            try:
                value, facts = self._play(words, task, client, episode, workspace.folder, workspace)
            except CommandError as error:
                error.info["diff"] = workspace.diff()
                raise
            reward, info = read_return_value(value)
            return {"reward": reward, "success": info.pop("success", None), "info": {**info, **facts}}

    def _play(
        self,
        words: list[str],
        task: dict[str, Any],
        client: AgentClient,
        episode: Path,
        folder: Path,
        workspace: Workspace | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Run the program and verify what it did; return what an agent returns, and facts about it."""
        variables = self._variables(client, episode, folder)
        program = _Program(words, variables, self._limits, episode, None if workspace is None else folder)
        client.at_end(program.end)
        with program:
            while True:
                left = None if self.timeout is None else self.timeout - client.session.own_seconds()
                if left is not None and left <= 0:
                    raise CommandError(f"it took more than {self.timeout:g} s")
                if (returncode := program.wait(None if left is None else max(left, MIN_WAIT))) is not None:
                    break
        stdout, stderr = program.outputs()
        if returncode == supervisor.OVER_LIMIT or (
            returncode != 0 and not self._checks and "returncode" not in self._verified
        ):
            raise CommandError(_failed(returncode, stderr))
        facts: dict[str, Any] = {}
        if workspace is not None:
            facts["diff"] = workspace.diff()
            workspace.restore(self.restore)
        if not self._checks:
            values = dict(zip(_VERIFIED, [task, stdout, stderr, returncode, folder]))
            return result_of(self.verify(**{name: values[name] for name in self._verified})), facts
        if returncode != 0:
            facts["program"] = _failed(returncode, stderr)
        checks = _Program(
            [_filled(word, task) for word in self._checks], self._without_key(variables), self._limits, episode, folder
        )
        client.at_end(checks.end)
        with checks:
            returncode = checks.wait(self.verify_timeout)
        if returncode is None:
            return 0.0, {**facts, "verify": f"it took more than {self.verify_timeout:g} s"}
        stdout, stderr = checks.outputs()
        return _reward(returncode, stdout), {**facts, "verify": (stdout + stderr)[-2000:]}

    def _variables(self, client: AgentClient, episode: Path, folder: Path) -> dict[str, str]:
        variables = dict(os.environ)
        bypass_proxies(variables)
        own = str(Path(sys.executable).parent)
        path = variables.get("PATH", os.defpath)
        variables["PATH"] = path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"
        variables |= {name: getattr(client, part) for name, part in _VARIABLES.items()}
        variables["EPISODE_FOLDER"] = str(episode)
        if folder != episode:
            for name in ("home", "tmp"):
                (episode / name).mkdir()
            variables |= {"HOME": str(episode / "home"), "TMPDIR": str(episode / "tmp"), "PWD": str(folder)}
        return {**variables, **self.environment}

    def _without_key(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the variables of a command that verifies: it has no model to ask."""
        return {name: value for name, value in variables.items() if name in self.environment or name not in _VARIABLES}


class _Program:
    """A running program, with limits, and all that it starts: both end at the end of the context."""

    def __init__(
        self, words: list[str], variables: dict[str, str], limits: dict[str, int], episode: Path, folder: Path | None
    ):
        if shutil.which(words[0], path=variables["PATH"]) is None:
            raise FileNotFoundError(
                f"{words[0]} is not found: give the program's path, or install it where training runs"
            )
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        limits = json.dumps({"folder": str(episode), **limits})
        command = [*_SUPERVISOR, limits, *words]
        self._process = subprocess.Popen(command, **pipes, env=variables, process_group=0, cwd=folder)
        self._outputs = [_Output(self._process.stdout), _Output(self._process.stderr)]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self.end()

    def wait(self, seconds: float | None) -> int | None:
        """Return the exit status; `None`: it still runs after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)

    def outputs(self) -> list[str]:
        """Return what it wrote to stdout and to stderr."""
        return [output.text() for output in self._outputs]

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdin.close()


def _reward(returncode: int, stdout: str) -> float:
    """Return the number in the last line of what a command printed, or else whether its exit status is 0."""
    with contextlib.suppress(ValueError, IndexError):
        number = float(stdout.strip().splitlines()[-1])
        if math.isfinite(number):
            return number
    return float(returncode == 0)


def _words(name: str, command: Any) -> list[str]:
    """Return a command's words. Raises `G2POError` if it has none, or a placeholder that is no column's name."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise G2POError(f"{name} is {command!r} ({error}): quote as in a shell") from error
    if not words:
        raise G2POError(f"{name} is {command!r}: give a program and its arguments")
    _check_placeholders(name, words)
    return words


def _check_placeholders(name: str, words: list[str]) -> None:
    """Refuse a placeholder that is not a name."""
    try:
        for _, column, form, conversion in string.Formatter().parse("\n".join(words)):
            if column is not None and (not column.isidentifier() or form or conversion):
                raise ValueError(f"{{{column}}} is not the name of a column")
    except ValueError as error:
        raise G2POError(f"{name} is {words!r} ({error}): write {{column}}, and {{{{ for a brace") from error


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
