"""Validate values that an environment returns. Each error names the violation and its remedy.

The pool applies these checks to all results of an environment; `check.contract` plays an environment with them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..prompts.conversation import ChatRequest, pictures_of, since_last_completion
from ..utils.errors import G2POError
from ..utils.images import Picture, as_picture
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


def validate_observation(
    value: Any,
    where: str,
    max_characters: int | None = None,
    max_images: int | None = None,
    max_pixels: int | None = None,
) -> Observation:
    """Return a result as an `Observation`, a string as one without a key and actions; images become `Picture`s.

    `where` names the call. Raises `EnvironmentContractError` for another type, also of a field, a longer text, and
    more or larger images.
    """
    if isinstance(value, str):
        value = Observation(value)
    _require(isinstance(value, Observation), f"{where} returned", value, "an Observation, or its text as a string")
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
        are_texts = listed and all(isinstance(action, str) for action in actions)
        _require(are_texts, f"{where}: Observation.admissible_actions is", actions, "a list of strings, or None")
        actions = [_plain_text(action, f"{where}: an admissible action") for action in actions]
    if max_characters is not None and len(texts["text"]) > max_characters:
        raise EnvironmentContractError(
            f"{where}: the observation has {len(texts['text'])} characters, more than {max_characters}; shorten "
            "it in the environment"
        )
    is_request = value.request is None or isinstance(value.request, ChatRequest)
    _require(is_request, f"{where}: Observation.request is", value.request, "a ChatRequest, or None")
    images = _pictures(value, where)
    if max_images is not None and len(images) > max_images:
        raise EnvironmentContractError(
            f"{where}: the observation has {len(images)} images, more than max_observation_images={max_images}: show "
            "fewer, or raise it"
        )
    for width, height in (image.size for image in images):
        if max_pixels is not None and width * height > max_pixels:
            raise EnvironmentContractError(
                f"{where}: an image has {width} x {height} pixels, more than max_image_pixels={max_pixels}: make it "
                "smaller in the environment, or raise it"
            )
    if images and texts["state_key"] is None:
        texts["state_key"] = "\n".join([texts["text"], *images])
    # A new object: a subclass may not unpickle in the trainer.
    return Observation(admissible_actions=actions, request=value.request, images=images, **texts)


def _pictures(seen: Observation, where: str) -> tuple[Picture, ...]:
    """Return the images of an observation; of a request, those of the messages since the last completion."""
    if seen.request is not None:
        found = pictures_of(since_last_completion(seen.request.messages))
        _require(
            list(seen.images) in ([], found), f"{where}: Observation.images is", seen.images, "them in the request"
        )
        return tuple(found)
    listed = isinstance(seen.images, (list, tuple))
    _require(listed, f"{where}: Observation.images is", seen.images, "a list of images")
    try:
        return tuple(as_picture(image, f"{where}: an image") for image in seen.images)
    except G2POError as error:
        raise EnvironmentContractError(str(error)) from error


def validate_step(value: Any, where: str, *limits: int | None) -> StepResult:
    """Return the value as a `StepResult` with an `Observation` and a float reward. See `validate_observation`."""
    _require(isinstance(value, StepResult), f"{where} returned", value, "StepResult(observation, reward, terminated)")
    try:
        given = value.reward.item() if hasattr(value.reward, "item") else value.reward  # numpy or torch scalar
        reward = math.nan if isinstance(given, (str, bytes, bool)) else float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        reward = math.nan
    _require(math.isfinite(reward), f"{where}: reward is", value.reward, "a finite number")
    ends = {}
    for name in ("terminated", "truncated"):
        end = getattr(value, name)
        is_bool = type(end).__name__ in ("bool", "bool_")  # also numpy's, by version
        _require(is_bool, f"{where}: {name} is", end, "True or False")
        ends[name] = bool(end)
    observation = validate_observation(value.observation, where, *limits)
    return StepResult(observation, reward, info=_validate_info(value.info, where), **ends)


def _validate_info(info: Any, where: str) -> dict[str, Any]:
    """Return the info as plain data, since trajectories are written as JSON."""
    _require(isinstance(info, dict), f"{where}: info is", info, "a dict")
    try:
        data = to_plain(info)
    except Exception as error:  # a reference cycle, or an object whose text cannot be computed
        raise EnvironmentContractError(
            f"{where}: info cannot be stored as JSON ({error!r}); return plain data in it"
        ) from error
    for name, score in data.items():
        is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
        wanted = "a finite number, or rename it: evaluations report the mean"
        _require(is_number or not is_score(name), f"{where}: info[{name!r}] is", info.get(name, score), wanted)
    is_known = data.get("success") in (True, False, None)
    _require(is_known, f"{where}: info['success'] is", info.get("success"), "True or False")
    if data.get("success", True) is None:  # unknown: the reward decides
        del data["success"]
    return data


def player_of(environment_factory: Callable, task: Mapping[str, Any]) -> tuple[Callable, Mapping[str, Any]]:
    """Return the factory of the environment that plays a task, and the arguments of its `reset`.

    Of several environments (`MixedEnvironment`), the task chooses one.
    """
    choose = getattr(unwrap_factory(environment_factory), "player_of_task", None)
    return (environment_factory, task) if choose is None else choose(environment_factory, task)


def check_task_columns(environment_factory: Callable, task: Mapping[str, Any]) -> None:
    """Refuse (`G2POError`) a parameter of `reset` without a column, and a column that `reset` does not accept."""
    environment_factory, task = player_of(environment_factory, task)
    made, columns = unwrap_factory(environment_factory), list(task)
    if not inspect.isclass(made):  # a plain function constructs the environment: it is unknown before a call
        return
    try:
        inspect.signature(made.reset).bind(None, **dict.fromkeys(columns))
    except TypeError as error:
        raise G2POError(
            f"{made.__name__}.reset does not take the columns {', '.join(columns) or '(none)'} ({error}): add or "
            "rename a column, or add **columns to reset's arguments"
        ) from error


def _require(valid: bool, what: str, value: Any, wanted: str) -> None:
    if not valid:
        raise EnvironmentContractError(f"{what} {show(value)}; give {wanted}")


def _plain_text(value: Any, what: str) -> str:
    _require(isinstance(value, str), f"{what} is", value, "a string")
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
