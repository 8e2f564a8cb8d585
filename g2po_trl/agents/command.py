"""Agents that are programs, in any language."""

from __future__ import annotations

import inspect
import math
import os
import re
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from ..utils.errors import G2POError
from ..utils.json import to_json
from ..utils.options import is_of_kind, require
from ..utils.show import describe_exit
from .agent import AgentClient, read_return_value, result_of
from .dialects import VARIABLES
from .program import OVER_LIMIT, Program, disk_bytes, require_program
from .session import AgentError
from .workspace import Workspace, matching

_VERIFIED = ("task", "stdout", "stderr", "returncode", "folder")
# Variables that lead to the user's own settings and repository; a workspace has its own.
_OF_USER = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME")
_OF_USER += ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_CONFIG_GLOBAL")
# What tests read by themselves, and so what a program may write to have them pass.
_TEST_SETTINGS = ("**/conftest.py", "pytest.*", ".pytest.*", "tox.ini", "pytest", "_pytest")
_TEST_SETTINGS += ("**/sitecustomize*", "**/usercustomize*")
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
_SHOWN = 2000  # last characters of what a command that verifies printed


@dataclass(eq=False, repr=False)
class AgentCommand:
    """An agent that is a program, for `AgentEnvironment` or `G2POTrainer(agent=…)`.

    The program finds the model in `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, the same with `ANTHROPIC_`,
    or `GOOGLE_GEMINI_BASE_URL`, `GEMINI_API_KEY` and `GEMINI_MODEL`. `EPISODE_FOLDER` is an empty folder, removed
    after the episode. What it starts ends with it, including daemons. This is not a sandbox: it can do what you can.

    With a `workspace`, it runs in the episode's own copy of that folder, and `HOME` and `TMPDIR` are the episode's.
    A state is the files and the new messages (`workspace_key`), and `info["diff"]` has the changes.

    Args:
        command: the program and its arguments, as in a shell or a list. `{column}` is the task's value, within one
            argument; `{{` is a brace. Write `--question={question}` or `-- {question}`: a value may begin with `-`.
        verify: function, sync or async, that returns what an agent may return. Its parameters are any of `task`,
            `stdout`, `stderr`, `returncode` and `folder` (the workspace, or else the episode's). Without `returncode`,
            an exit status other than 0 is an exception of the agent. With a workspace it may be a command, such as
            `pytest -q`, which runs there with its own `HOME` and `TMPDIR`: the reward is 1 if it exits with 0, else 0.
        environment: further environment variables.
        timeout: seconds of the program, without waiting for the model; more is a failure. `None`: `step_timeout`.
        workspace: folder that the program works on; `{column}` is replaced by the task's value.
        files: path below `HOME` -> text, such as settings; `$OPENAI_API_KEY` and other variables in it are replaced.
        ignore: names of files and folders, such as `*.log`, that are no part of states and diffs, beyond `IGNORED`.
        restore: patterns of files that are put back into the workspace before `verify`, such as `tests` or
            `test_*.py`, so that changing them is not rewarded; before a command, also the settings of pytest.
        verify_timeout: seconds of a command that verifies; more is an error. `None`: no limit.
        max_processes, max_disk_mb: processes, and MiB below the episode's folder; more is a failure. `None`: no limit.
    """

    command: str | Sequence[str]
    verify: Callable[..., Any] | str | None = None
    environment: Mapping[str, str] | None = None
    timeout: float | None = None
    _: KW_ONLY
    workspace: str | Path | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    restore: str | Path | Sequence[str | Path] = ()
    verify_timeout: float | None = 30.0
    max_processes: int | None = 256
    max_disk_mb: float | None = 1024.0

    def __post_init__(self) -> None:
        for name in ("timeout", "verify_timeout", "max_processes", "max_disk_mb"):
            limit = getattr(self, name)
            is_limit = limit is None or (is_of_kind(limit, float) and limit > 0)
            require(is_limit, name, limit, "set it to a number above 0, or to None")
        verify, restore, is_command = self.verify, self.restore, isinstance(self.verify, str)
        self.words, self.checks = _words("command", self.command), _words("verify", verify) if is_command else []
        self.verified = [] if is_command else _verified(verify)
        self.restore = tuple(map(os.fspath, [restore] if isinstance(restore, (str, os.PathLike)) else restore))
        for name, value in {"verify": self.checks, "restore": self.restore, "files": self.files}.items():
            remedy = "it is for a program with a workspace: give one"
            require(self.workspace is not None or not value, name, getattr(self, name), remedy)
        _words("workspace", [str(self.workspace)])
        for name, paths in {"restore": self.restore, "files": self.files}.items():
            outside = [path for path in paths if path.startswith("/") or ".." in path.split("/")]
            require(not outside, name, outside, "give names relative to the workspace, or to HOME")
        self.__module__ = getattr(verify, "__module__", None)  # where `run.json` looks for its name
        self.environment = {name: str(value) for name, value in (self.environment or {}).items()}
        disk_mb = math.inf if self.max_disk_mb is None else self.max_disk_mb
        self.limits = {"processes": self.max_processes or math.inf, "disk_bytes": disk_mb * 2**20}

    def __call__(self, task: dict[str, Any], client: AgentClient) -> Any:
        """Run the program and return what `verify` returns. Raises `AgentError` if it fails or takes too long."""
        with tempfile.TemporaryDirectory(prefix="episode-", ignore_cleanup_errors=True) as name:
            return _Episode(self, task, client, Path(name).resolve()).play()  # the path as programs print it


class _Episode:
    """One episode of a command, in a folder of its own."""

    def __init__(self, command: AgentCommand, task: dict[str, Any], client: AgentClient, folder: Path):
        self.command, self.task, self.client, self.folder = command, task, client, folder
        self.workspace: Workspace | None = None
        own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
        self.variables = {**os.environ, "EPISODE_FOLDER": str(folder)}
        self.variables["PATH"] = path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"
        self.variables |= {name: getattr(client, attribute) for name, attribute in VARIABLES.items()}
        self.variables |= command.environment

    def play(self) -> Any:
        command = self.command
        if command.workspace is None:
            return self._verify(*self._run())
        self.workspace = workspace = self._copied()
        self.client.works_on(workspace)
        try:
            returncode, stdout, stderr = self._run()
        except AgentError as error:
            error.info["diff"] = workspace.diff()
            raise
        facts = {"diff": workspace.diff()}
        workspace.restore([*command.restore, *(_TEST_SETTINGS if command.checks else ())])
        if command.checks:
            facts |= {} if returncode == 0 else {"program": _failed(returncode, stderr)}
            reward, info = self._check()
        else:
            reward, info = read_return_value(self._verify(returncode, stdout, stderr))
        return {"reward": reward, "success": info.pop("success", None), "info": {**info, **facts}}

    def _copied(self) -> Workspace:
        """Copy the workspace. What it lacks is told before the agent asks: it would be the model's failure."""
        command, source = self.command, Path(_filled(str(self.command.workspace), self.task))
        workspace = Workspace(source, self.folder / "workspace", command.ignore)
        size = disk_bytes(str(self.folder))
        remedy = f"the workspace takes {size / 2**20:.0f} MiB before the agent begins: raise it, or leave files out"
        require(size <= command.limits["disk_bytes"], "max_disk_mb", command.max_disk_mb, remedy)
        is_there = not command.restore or bool(matching(workspace.source, command.restore))
        remedy = f"no file of {str(workspace.source)!r} matches it: name those that `verify` runs"
        require(is_there, "restore", list(command.restore), remedy)
        variables = {name: text for name, text in self.variables.items() if name not in _OF_USER}
        self.variables = variables | _own_folders(self.folder) | {"PWD": str(workspace.folder)} | command.environment
        for name, text in command.files.items():
            path = self.folder / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(text).safe_substitute(self.variables))
        if command.checks:
            try:
                require_program(_filled(command.checks[0], self.task), self.variables, workspace.folder)
            except FileNotFoundError as error:
                raise G2POError(str(error), "verify", command.verify) from error
        return workspace

    def _program(self, words: list[str], variables: dict[str, str]) -> Program:
        limits = {"folder": str(self.folder), **self.command.limits}
        where = self.workspace and self.workspace.folder
        program = Program([_filled(word, self.task) for word in words], variables, limits, where)
        self.client.at_end(program.close)
        return program

    def _run(self) -> tuple[int, str, str]:
        """Run the program; return its exit status, stdout and stderr. Raises `AgentError` if it fails."""
        timeout, returncode, left, session = self.command.timeout, None, None, self.client.session
        begun = session.own_seconds()  # a large workspace takes long to copy
        with closing(self._program(self.command.words, self.variables)) as program:
            while returncode is None:
                if timeout is not None and (left := timeout + begun - session.own_seconds()) <= 0:
                    raise AgentError(f"it took more than {timeout:g} s", limit="time limit")
                returncode = program.wait(None if left is None else max(left, 0.1))
        stdout, stderr = program.outputs()
        if not session.answered and not session.unanswered():
            why = "".join([f" ({refused})" for refused in session.refused[-1:]])
            raise AgentError(f"it did not call the model{why}: {_failed(returncode, stderr or stdout)}")
        may_fail = self.command.checks or "returncode" in self.command.verified
        limit = "program limit" if returncode == OVER_LIMIT else None
        if limit or (returncode != 0 and not may_fail):
            raise AgentError(_failed(returncode, stderr), limit)
        return returncode, stdout, stderr

    def _verify(self, returncode: int, stdout: str, stderr: str) -> Any:
        values = dict(zip(_VERIFIED, [self.task, stdout, stderr, returncode, (self.workspace or self).folder]))
        return result_of(self.command.verify(**{name: values[name] for name in self.command.verified}))

    def _check(self) -> tuple[float, dict[str, Any]]:
        """Return the reward of the command `verify`, which has no access to the model, and what it printed."""
        variables = {name: text for name, text in self.variables.items() if name not in VARIABLES}
        own = Path(tempfile.mkdtemp(prefix="verify-", dir=self.folder))  # the agent's settings and caches are not its
        variables |= {**_own_folders(own), "PYTHONPYCACHEPREFIX": str(own / "pycache"), **self.command.environment}
        try:
            with closing(self._program(self.command.checks, variables)) as checks:
                returncode = checks.wait(seconds := self.command.verify_timeout)
        except FileNotFoundError as error:  # the agent has removed it
            return 0.0, {"verify": str(error)}
        if returncode is None:
            raise TimeoutError(f"verify took more than {seconds:g} s: raise verify_timeout, or run fewer workers")
        return float(returncode == 0), {"verify": "".join(checks.outputs())[-_SHOWN:]}


def _own_folders(parent: Path) -> dict[str, str]:
    for name in ("home", "tmp"):
        (parent / name).mkdir()
    return {"HOME": str(parent / "home"), "TMPDIR": str(parent / "tmp")}


def _words(name: str, command: Any) -> list[str]:
    """Return a command's words. Raises `G2POError` if it has none, or a placeholder that is not a column's name."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        "\n".join(words).format_map(defaultdict(str))
    except (ValueError, AttributeError) as error:
        remedy = "quote as in a shell, and write {column} for the value of a column, and {{ for a brace"
        raise G2POError(f"{name} is {command!r} ({error}): {remedy}", name, command) from error
    require(bool(words), name, command, "give a program and its arguments")
    return words


def _filled(word: str, task: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else to_json(value) for name, value in task.items()}
    try:  # no argument can contain a zero or a lone surrogate
        return word.format_map(texts).replace("\0", "").encode("utf-8", "replace").decode("utf-8")
    except KeyError as error:
        why = f"command has {{{error.args[0]}}}, and the task's columns are {', '.join(task)}: rename the placeholder"
        raise G2POError(why, "command", word) from error


def _verified(verify: Any) -> list[str]:
    require(callable(verify), "verify", verify, "pass a function that returns the reward, e.g. of (task, stdout)")
    parameters = inspect.signature(verify).parameters.values()
    wanted = [p.name for p in parameters if p.name in _VERIFIED or p.default is p.empty]
    remedy = f"it takes {', '.join(wanted)}, and its parameters can be {', '.join(_VERIFIED)}"
    require(set(wanted) <= set(_VERIFIED), "verify", verify, remedy)
    return wanted


def _failed(returncode: int, stderr: str) -> str:
    """Return how a program failed, and the line of stderr that says why: the last error, else the last line."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if _ERROR_LINE.match(line)]  # Node writes its version after them
    return ": ".join([describe_exit(returncode), *(errors or lines)[-1:]])
