"""Play an environment and list its contract violations, one line each, with the line of the user's code."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..utils.show import show
from .causes import inner
from .contract import TextEnvironment
from .validation import EnvironmentContractError, check_task_columns, factory_name, validate_observation, validate_step

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FRAME = re.compile(r'^[ |]*File "(.+)", line (\d+), in ', re.MULTILINE)  # also in the traceback of a group
IMPOSSIBLE = ("\x00 no such action", "", "行动 ход 🚪", "go\nto", "look " * 2000)


def mutated_actions(admissible_actions: Sequence[str], most: int = 6) -> list[str]:
    """Return impossible actions and near misses of admissible ones, as a language model writes them."""
    kinds: dict[str, str] = {}
    for action in admissible_actions:
        kinds.setdefault(action.partition(" ")[0], action)
    near = []
    for action in list(kinds.values())[:most]:
        words = action.split(" ")
        near += [" ".join([*words[:-1], "xyzzy"]), f"{action} xyzzy", f" {action}\n"]
        near += [" ".join(words[:-1])] if len(words) > 1 else []
    return [*IMPOSSIBLE, *dict.fromkeys(near)]


def where_raised(error: BaseException | str) -> str:
    """Return `, FILE, line N` of the last line of the user's code in an exception or in a traceback's text, or ""."""
    if isinstance(error, str):
        frames = _FRAME.findall(error)
    else:
        traces = [one.__traceback__ for one in (error, *inner(error))]
        frames = [(frame.filename, frame.lineno) for trace in traces for frame in traceback.extract_tb(trace)]
    for file, line in reversed(frames):
        path = Path(file)
        if path.is_file() and not path.is_relative_to(_PACKAGE) and not file.startswith(_LIBRARIES):
            here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f", {here}, line {line}"
    return ""


def check_environment(
    environment_factory: Callable[[], TextEnvironment],
    task: dict[str, Any],
    actions: Sequence[str] | None = None,
    max_steps: int = 20,
) -> None:
    """Play an environment in this process and raise at the first violation of its contract.

    Args:
        environment_factory: as passed to the trainer.
        task: one dataset row: keyword arguments of `reset`.
        actions: actions to play. Default: the first admissible action of each observation.
        max_steps: maximum number of steps to play.

    Raises:
        EnvironmentContractError: for the first violation; the message says how to correct it.
        ValueError: if `task` does not fit the arguments of `reset`.
    """
    check_task_columns(environment_factory, task)
    for problem in find_violations(environment_factory, task, actions, max_steps):
        raise EnvironmentContractError(problem)


def find_violations(
    environment_factory: Callable[[], TextEnvironment],
    task: dict[str, Any],
    actions: Sequence[str] | None = None,
    max_steps: int = 20,
) -> Iterator[str]:
    """Play an environment in this process and yield each contract violation once.

    If several actions raise in one line of code, the first is named. Arguments as of `check_environment`.
    """
    name = factory_name(environment_factory)
    try:
        environment = environment_factory()
    except Exception as error:
        yield (
            f"constructing {name} raised {_short(error)}{where_raised(error)}. Bind the arguments it needs "
            "with functools.partial"
        )
        return
    missing = [method for method in ("reset", "step", "close") if not callable(getattr(environment, method, None))]
    if missing:
        yield f"{name} has no method {', '.join(missing)}: derive it from TextEnvironment"
        return
    try:
        yield from _Probe(name, environment, task).find_violations(actions, max_steps)
    finally:
        environment.close()


class _Probe:
    """An environment under test, with the violations reported so far."""

    def __init__(self, name: str, environment: TextEnvironment, task: dict[str, Any]):
        self.name, self.environment, self.task = name, environment, task
        self.reported: set[str] = set()

    def find_violations(self, actions: Sequence[str] | None, max_steps: int) -> Iterator[str]:
        first = yield from self._reset()
        again = yield from self._reset()
        if first is None or again is None:
            return
        if first != again:
            yield (
                f"{self.name}.reset is not deterministic: the same task gave {show(first.text)} and then "
                f"{show(again.text)}. Episodes of a group must start in the same state: seed randomness from the task"
            )
        for action in mutated_actions(first.admissible_actions or ()):
            if (yield from self._step(action)) is None:
                yield from self._reset()
        observation = yield from self._reset()
        for number in range(max_steps if actions is None else len(actions)):
            if observation is None:
                return
            action = actions[number] if actions is not None else (observation.admissible_actions or ["look"])[0]
            observation = yield from self._step(action)

    def _reset(self) -> Iterator[str]:
        try:
            return validate_observation(self.environment.reset(**deepcopy(self.task)), f"{self.name}.reset")
        except Exception as error:
            remedy = "Remove tasks that cannot be played from the dataset"
            yield from self._report(error, "in reset", remedy)

    def _step(self, action: str) -> Iterator[str]:
        """Return the next observation; `None` at the end of an episode."""
        try:
            result = validate_step(self.environment.step(action), f"{self.name}.step")
        except Exception as error:
            remedy = "Return an observation for an impossible action instead of raising"
            yield from self._report(error, f"on the action {show(action)}", remedy)
            return None
        return None if result.terminated or result.truncated else result.observation

    def _report(self, error: Exception, when: str, remedy: str) -> Iterator[str]:
        if isinstance(error, EnvironmentContractError):
            problem, text = _one_line(str(error)), _one_line(str(error))
        else:
            where = where_raised(error)
            problem = f"{', '.join(type(one).__name__ for one in inner(error))}{where}"
            text = f"{self.name} raised {_short(error)} {when}{where}. {remedy}"
        if problem not in self.reported:
            self.reported.add(problem)
            yield text


def _short(error: BaseException) -> str:
    text = "; ".join(f"{type(one).__name__}: {_one_line(str(one))}" for one in inner(error))
    return text if len(text) <= 300 else f"{text[:297]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
