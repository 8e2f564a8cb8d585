"""AppWorld as a `TextEnvironment`: an action is a piece of Python, an observation what it printed.

An environment owns a server (see `server.py`) and opens one world after the other in it, so a worker process of the
pool has as many servers as concurrent episodes. When a worker ends for any reason, its servers end with it.

Code that does not end is stopped by AppWorld after `code_timeout` seconds with a message, and the world continues.
Code that resists this (a loop around `try: … except: pass`) ends with its server, and its episode ends as a failure of
the agent.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Sequence

from g2po_envs.appworld.server import AppworldServer, AppworldTimeoutError, Installation, evaluation
from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.utils.options import require

KEYS = ("output", "output and calls")
_LONGEST_OUTPUT = 20_000
_FUNCTION = re.compile(r"apis\.\w+\.\w+")
# Seconds beyond `code_timeout` after which a server does not answer any more, and in which a step has ended.
_NO_ANSWER, STEP_GRACE = 10.0, 15.0


class AppworldEnvironment(TextEnvironment):
    """Plays tasks of an installation.

    Args:
        installation: the installation of AppWorld.
        success_reward: reward if the task is done and all its tests pass; otherwise the reward is 0.
        key: the state key. "output": the output of the last code, as in the paper's released code, where every
            "Execution successful." is the same state. "output and calls": the output, and the functions of apps that
            the code called.
        max_turns: the trainer's `max_turns`: code blocks of an episode. After the last one, the task is judged as if
            the agent had declared it done.
        code_timeout: maximum seconds of a code block. A step takes at most 15 more: set the pool's step limit (the
            trainer's `environment_step_timeout`) above this sum, or the step ends with its worker.
        refused: code that contains one of these texts, in any letter case, is not run, and the agent gets a message.
            The paper's released code refuses "..." and "except".
        start_timeout, call_timeout, max_worlds, max_memory: see `AppworldServer`.
    """

    def __init__(
        self,
        installation: Installation,
        success_reward: float = 10.0,
        key: str = "output",
        max_turns: int | None = None,
        code_timeout: float = 40.0,
        refused: Sequence[str] = (),
        start_timeout: float = 60.0,
        call_timeout: float = 45.0,
        max_worlds: int = 50,
        max_memory: float = 2e9,
    ):
        require(key in KEYS, "key", key, f"choose one of {', '.join(KEYS)}")
        require(
            code_timeout >= 1, "code_timeout", code_timeout, "set it to at least 1 second, AppWorld counts whole ones"
        )
        require(not isinstance(refused, str), "refused", refused, "pass a list of texts, e.g. ['...', 'except']")
        installation.check()
        self.code_timeout, self.refused = code_timeout, tuple(refused)
        self.installation, self.success_reward, self.key, self.max_turns = installation, success_reward, key, max_turns
        self.limits = {
            "start_timeout": start_timeout,
            "call_timeout": call_timeout,
            "max_worlds": max_worlds,
            "max_memory": max_memory,
        }
        self._server: AppworldServer | None = None

    def reset(self, task_id: str, **ignored_columns) -> Observation:
        """Open the task's world, in a new server if the old one is over its limits."""
        if self._server is not None and not self._server.fresh:
            self._server.close()
            self._server = None
        deadline = time.monotonic() + self.limits["start_timeout"] + self.limits["call_timeout"]
        if self._server is None:
            self._server = AppworldServer(self.installation, **self.limits)
        self.task_id, self._turns = task_id, 0
        self._server.worlds += 1
        opened = self._server.call(
            "initialize",
            deadline - time.monotonic(),
            task_id=task_id,
            experiment_name="g2po_trl",
            max_interactions=10_000,
            raise_on_failure=False,
            timeout_seconds=int(self.code_timeout),
        )
        person = opened["supervisor"]
        task = (
            f"{opened['instruction']}\n(You act for {person['first_name']} {person['last_name']}, {person['email']}, "
            f"phone {person['phone_number']}. It is {opened['datetime']}.)"
        )
        return Observation("Nothing has been run yet.", task=task)

    def step(self, action: str) -> StepResult:
        """Run a piece of code in the world."""
        if self._server is None:
            raise RuntimeError("call reset before step")
        self._turns += 1
        deadline = time.monotonic() + self.code_timeout + STEP_GRACE
        try:
            output = self._run(action)
        except AppworldTimeoutError:
            return self._lost_to_endless_code()
        done = bool(self._call_before(deadline, "task_completed"))
        observation = Observation(_shortened(output), self._key_of(output, action))
        if not done and (self.max_turns is None or self._turns < self.max_turns):
            return StepResult(observation)
        success, score = evaluation(self._call_before(deadline, "evaluate", suppress_errors=True))
        info = {"success": success, "score": score, "completed": done}
        return StepResult(observation, self.success_reward * success, terminated=True, info=info)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _run(self, code: str) -> str:
        """Return the output of the code, or why it did not run."""
        word = next((word for word in self.refused if word.lower() in code.lower()), None)
        if word is not None:
            return f"Execution failed. {word!r} is not allowed in your code."
        output = self._server.call("execute", self.code_timeout + _NO_ANSWER, task_id=self.task_id, code=code)
        return str(output).strip()

    def _call_before(self, deadline: float, name: str, **arguments):
        left = max(1.0, deadline - time.monotonic())
        return self._server.call(name, left, task_id=self.task_id, **arguments)

    def _lost_to_endless_code(self) -> StepResult:
        """Return the failed step after endless code, which ended the server and its world."""
        self.close()
        limit = f"{int(self.code_timeout)} seconds"
        text = f"Execution failed. Traceback:\nExecution timed out after {limit}. The world had to be closed."
        reason = f"endless code: it ran on after AppWorld stopped it at {limit}"
        info = {"success": False, "score": 0.0, "completed": False, "failure_reason": reason}
        return StepResult(Observation(text), terminated=True, info=info)

    def _key_of(self, output: str, code: str) -> str | None:
        return None if self.key == "output" else f"{_shortened(output)}\n{', '.join(called_functions(code))}"


def called_functions(code: str) -> list[str]:
    """Return the app functions that code calls (`apis.app.function(…)`), in order; none for invalid Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(call.lineno, call.col_offset, ast.unparse(call.func)) for call in calls]
    return [name for _, _, name in sorted(names) if _FUNCTION.fullmatch(name)]


def _shortened(text: str) -> str:
    half = _LONGEST_OUTPUT // 2
    return text if len(text) <= _LONGEST_OUTPUT else f"{text[:half]}\n…\n{text[-half:]}"
