"""Does an environment keep its contract? Each broken promise is named with what to do about it.

`check_environment` is a user's first command, in this process; the pool applies the same checks to everything an
environment returns while it runs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..utils.json import to_plain
from .contract import Observation, StepResult, TextEnvironment


class EnvironmentContractError(ValueError):
    """An environment returned or did something that its contract excludes."""


def is_score(name: str) -> bool:
    """Is this name in `info` a score's? Their means are logged and reported."""
    return name == "score" or name.startswith("score_")


def factory_name(environment_factory: Callable) -> str:
    """What to call an environment in messages."""
    while isinstance(environment_factory, functools.partial):
        environment_factory = environment_factory.func
    return getattr(environment_factory, "__name__", repr(environment_factory))


def checked_observation(value: Any, where: str, max_characters: int | None = None) -> Observation:
    """The value as an `Observation`; a string is one without a key and actions.

    Raises:
        EnvironmentContractError: for anything else, or fields of the wrong type.
    """
    if isinstance(value, str):
        value = Observation(value)
    if not isinstance(value, Observation):
        raise EnvironmentContractError(
            f"{where} returned {_show(value)} as observation; return an Observation, or its text as a string"
        )
    texts = {"text": _plain_text(value.text, f"{where}: Observation.text")}
    for name in ("state_key", "task"):
        text = getattr(value, name)
        texts[name] = None if text is None else _plain_text(text, f"{where}: Observation.{name}")
    actions = value.admissible_actions
    actions = actions.tolist() if hasattr(actions, "tolist") else actions
    if actions is not None:
        if (
            isinstance(actions, str)
            or not isinstance(actions, Sequence)
            or not all(isinstance(a, str) for a in actions)
        ):
            raise EnvironmentContractError(
                f"{where}: Observation.admissible_actions is {_show(actions)}; give a list of strings, or None"
            )
        if _are_plain(actions):
            actions = list(actions)
        else:
            actions = [_plain_text(action, f"{where}: an admissible action") for action in actions]
    if max_characters is not None and len(texts["text"]) > max_characters:
        raise EnvironmentContractError(
            f"{where}: the observation has {len(texts['text'])} characters, more than {max_characters}; shorten "
            "it in the environment"
        )
    return Observation(admissible_actions=actions, **texts)  # a subclass may not unpickle in the trainer


def checked_step(value: Any, where: str, max_characters: int | None = None) -> StepResult:
    """The value as a `StepResult` with an `Observation` and a float reward.

    Raises:
        EnvironmentContractError: when it is none, or a field has the wrong type or is not finite.
    """
    if not isinstance(value, StepResult):
        raise EnvironmentContractError(
            f"{where} returned {_show(value)}; return StepResult(observation, reward, terminated)"
        )
    try:
        paid = value.reward.item() if hasattr(value.reward, "item") else value.reward  # numpy's, torch's
        reward = math.nan if isinstance(paid, (str, bytes, bool)) else float(paid)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentContractError(f"{where}: reward is {_show(value.reward)}; give a finite number")
    ends = {}
    for name in ("terminated", "truncated"):
        end = getattr(value, name)
        if not isinstance(end, bool) and type(end).__name__ not in ("bool", "bool_"):  # numpy's, by either name
            raise EnvironmentContractError(f"{where}: {name} is {_show(end)}; give True or False")
        ends[name] = bool(end)
    observation = checked_observation(value.observation, where, max_characters)
    return StepResult(observation, reward, info=_checked_info(value.info, where), **ends)


def _checked_info(info: Any, where: str) -> dict[str, Any]:
    """The info as plain data: trajectories hold it, and are written as JSON."""
    if not isinstance(info, dict):
        raise EnvironmentContractError(f"{where}: info is {_show(info)}; give a dict")
    try:
        data = to_plain(info)
    except Exception as error:  # refers to itself, or raises when it is asked for its text
        raise EnvironmentContractError(
            f"{where}: info cannot be stored as JSON ({error!r}); return plain data in it"
        ) from error
    check_facts(data, where, info)
    if data.get("success", True) is None:  # not known: the reward tells
        del data["success"]
    return data


def check_facts(data: dict[str, Any], where: str, given: Mapping[Any, Any] | None = None) -> None:
    """Are scores numbers, and is success a truth, in the info `data`? `given`: as the environment gave it.

    Raises:
        EnvironmentContractError: when they are not.
    """
    given = data if given is None else given
    for name, score in data.items():
        is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
        if is_score(name) and not is_number:
            raise EnvironmentContractError(
                f"{where}: info[{name!r}] is {_show(given.get(name, score))}; give a finite number, or call it "
                "something else: evaluations report the mean"
            )
    if data.get("success") not in (True, False, None):
        raise EnvironmentContractError(f"{where}: info['success'] is {_show(given['success'])}; give True or False")


def check_task_columns(environment_factory: Callable, columns: Iterable[str]) -> None:
    """Do a dataset's columns fit the arguments of `reset`?

    Raises:
        ValueError: a parameter without a column, or a column `reset` does not take.
    """
    reset = _reset_function(environment_factory)
    if reset is None:  # a plain function makes the environment: only a call will tell
        return
    columns, name = list(columns), factory_name(environment_factory)
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = None
    else:
        accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [column for column in required if column not in columns]
    if missing:
        raise ValueError(
            f"{name}.reset needs {', '.join(missing)}, the columns are {', '.join(columns)}: add the missing column"
        )
    extra = [] if accepted is None else [column for column in columns if column not in accepted]
    if extra:
        raise ValueError(
            f"{name}.reset does not take {', '.join(extra)}: remove the column, or add **columns to reset's arguments"
        )


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
    from .contract_violations import problems

    check_task_columns(environment_factory, task)
    for problem in problems(environment_factory, task, actions, max_steps):
        raise EnvironmentContractError(problem)


def _reset_function(environment_factory: Callable) -> Callable | None:
    while isinstance(environment_factory, functools.partial):
        environment_factory = environment_factory.func
    return environment_factory.reset if inspect.isclass(environment_factory) else None


def _plain_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentContractError(f"{what} is {_show(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentContractError(
            f'{what} is not valid unicode ({error}): clean it by text.encode("utf-8", "replace").decode()'
        ) from error
    return str.__str__(value)  # a subclass may not unpickle in the trainer


def _are_plain(texts: Any) -> bool:
    """Is it a list of strings of no subclass, and valid unicode? One look at all of them."""
    try:
        return type(texts) is list and set(map(type, texts)) <= {str} and "".join(texts).encode() is not None
    except UnicodeEncodeError:
        return False


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
