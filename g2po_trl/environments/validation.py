"""Validate values that an environment returns. Each error names the violation and its remedy.

The pool applies these checks to all results of an environment; `evaluation.contract` plays an environment with them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..prompts.conversation import ChatRequest
from ..utils.errors import G2POError
from ..utils.json import to_plain
from ..utils.show import show
from .contract import Observation, StepResult


class EnvironmentContractError(G2POError):
    """An environment violated its contract."""


class UnusableWorkerError(RuntimeError):
    """Raise this in an environment if its worker process must be replaced. The episode ends as an error."""


def is_score(name: str) -> bool:
    """Return whether an entry of `info` is a score, whose mean is logged and reported."""
    return name == "score" or name.startswith("score_")


def factory_name(environment_factory: Callable) -> str:
    """Return the name of an environment in messages."""
    function = unwrap_factory(environment_factory)
    return getattr(function, "__name__", repr(function))


def unwrap_factory(environment_factory: Callable) -> Callable:
    """Return the class or function inside nested `functools.partial`s."""
    while isinstance(environment_factory, functools.partial):
        environment_factory = environment_factory.func
    return environment_factory


def validate_observation(value: Any, where: str, max_characters: int | None = None) -> Observation:
    """Return a result as an `Observation`, a string as one without a key and actions.

    `where`, the call, is for messages. Raises `EnvironmentContractError` for another type, fields of the wrong
    type, or a text of more than `max_characters`.
    """
    if isinstance(value, str):
        value = Observation(value)
    if not isinstance(value, Observation):
        raise EnvironmentContractError(
            f"{where} returned {show(value)} as observation; return an Observation, or its text as a string"
        )
    texts = {"text": _plain_text(value.text, f"{where}: Observation.text")}
    for name in ("state_key", "task"):
        text = getattr(value, name)
        texts[name] = None if text is None else _plain_text(text, f"{where}: Observation.{name}")
    actions = value.admissible_actions
    actions = actions.tolist() if hasattr(actions, "tolist") else actions
    if _are_plain(actions):
        actions = list(actions)
    elif actions is not None:
        listed = isinstance(actions, Sequence) and not isinstance(actions, str)
        if not listed or not all(isinstance(action, str) for action in actions):
            raise EnvironmentContractError(
                f"{where}: Observation.admissible_actions is {show(actions)}; give a list of strings, or None"
            )
        actions = [_plain_text(action, f"{where}: an admissible action") for action in actions]
    if max_characters is not None and len(texts["text"]) > max_characters:
        raise EnvironmentContractError(
            f"{where}: the observation has {len(texts['text'])} characters, more than {max_characters}; shorten "
            "it in the environment"
        )
    if value.request is not None and not isinstance(value.request, ChatRequest):
        raise EnvironmentContractError(
            f"{where}: Observation.request is {show(value.request)}; give a ChatRequest, or None"
        )
    # A new object: a subclass may not unpickle in the trainer.
    return Observation(admissible_actions=actions, request=value.request, **texts)


def validate_step(value: Any, where: str, max_characters: int | None = None) -> StepResult:
    """Return the value as a `StepResult` with an `Observation` and a float reward. See `validate_observation`."""
    if not isinstance(value, StepResult):
        raise EnvironmentContractError(
            f"{where} returned {show(value)}; return StepResult(observation, reward, terminated)"
        )
    try:
        given = value.reward.item() if hasattr(value.reward, "item") else value.reward  # numpy or torch scalar
        reward = math.nan if isinstance(given, (str, bytes, bool)) else float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentContractError(f"{where}: reward is {show(value.reward)}; give a finite number")
    ends = {}
    for name in ("terminated", "truncated"):
        end = getattr(value, name)
        if not isinstance(end, bool) and type(end).__name__ not in ("bool", "bool_"):  # numpy, by version
            raise EnvironmentContractError(f"{where}: {name} is {show(end)}; give True or False")
        ends[name] = bool(end)
    observation = validate_observation(value.observation, where, max_characters)
    return StepResult(observation, reward, info=_validate_info(value.info, where), **ends)


def _validate_info(info: Any, where: str) -> dict[str, Any]:
    """Return the info as plain data, since trajectories are written as JSON."""
    if not isinstance(info, dict):
        raise EnvironmentContractError(f"{where}: info is {show(info)}; give a dict")
    try:
        data = to_plain(info)
    except Exception as error:  # a reference cycle, or an object whose text cannot be computed
        raise EnvironmentContractError(
            f"{where}: info cannot be stored as JSON ({error!r}); return plain data in it"
        ) from error
    for name, score in data.items():
        if is_score(name) and (isinstance(score, bool) or not isinstance(score, (int, float))):
            raise EnvironmentContractError(
                f"{where}: info[{name!r}] is {show(info.get(name, score))}; give a finite number, or rename it: "
                "evaluations report the mean"
            )
    if data.get("success") not in (True, False, None):
        raise EnvironmentContractError(f"{where}: info['success'] is {show(info['success'])}; give True or False")
    if data.get("success", True) is None:  # unknown: the reward decides
        del data["success"]
    return data


def check_task_columns(environment_factory: Callable, columns: Iterable[str]) -> None:
    """Refuse (`G2POError`) a parameter of `reset` without a column, and a column that `reset` does not accept."""
    made = unwrap_factory(environment_factory)
    if not inspect.isclass(made):  # a plain function constructs the environment: it is unknown before a call
        return
    columns, name = list(columns), factory_name(environment_factory)
    own, *parameters = inspect.signature(made.reset).parameters.values()
    if own.name in columns:
        raise G2POError(f"{name}.reset cannot take a column {own.name}, the name of its own object: rename the column")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = None
    else:
        accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [column for column in required if column not in columns]
    if missing:
        given = f"the columns are {', '.join(columns)}" if columns else "the task has no columns"
        raise G2POError(f"{name}.reset needs {', '.join(missing)}, {given}: add the missing column")
    extra = [] if accepted is None else [column for column in columns if column not in accepted]
    if extra:
        raise G2POError(
            f"{name}.reset does not take {', '.join(extra)}: remove the column, or add **columns to reset's arguments"
        )


def _plain_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentContractError(f"{what} is {show(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentContractError(
            f'{what} is not valid unicode ({error}): clean it by text.encode("utf-8", "replace").decode()'
        ) from error
    return str.__str__(value)  # a subclass may not unpickle in the trainer


def _are_plain(texts: Any) -> bool:
    """Return whether it is a list of exact, valid strings: one fast check instead of one per string."""
    try:
        return type(texts) is list and set(map(type, texts)) <= {str} and "".join(texts).encode() is not None
    except UnicodeEncodeError:
        return False
