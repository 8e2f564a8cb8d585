"""Validate values that an environment returns, in the pool's workers and in `g2po check`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..prompts.conversation import ChatRequest, pictures_of, since_last_completion
from ..utils.errors import G2POError
from ..utils.images import Picture, as_picture
from ..utils.json import to_plain
from ..utils.options import is_of_kind
from ..utils.show import show
from .contract import Observation, StepResult

if TYPE_CHECKING:
    from .pool.limits import PoolLimits


class EnvironmentContractError(G2POError):
    """An environment violated its contract."""


def is_score(name: str) -> bool:
    """Return whether an entry of `info` is a score, whose mean is logged and reported."""
    return name == "score" or name.startswith("score_")


def factory_name(environment_factory: Callable) -> str:
    """Return the name of an environment in messages."""
    return getattr(unwrap_factory(environment_factory), "__name__", repr(environment_factory))


def unwrap_factory(environment_factory: Callable) -> Callable:
    """Return the class or function inside nested `functools.partial`s."""
    while isinstance(environment_factory, functools.partial):
        environment_factory = environment_factory.func
    return environment_factory


def check_call(function: Callable, field: str, columns: Iterable[str], what: str, remedy: str, *first: Any) -> None:
    """Refuse (`G2POError`) a function that does not take these columns of a task as keywords, after `first`."""
    try:
        inspect.signature(function).bind(*first, **dict.fromkeys(columns))
    except TypeError as error:
        message = f"{what} does not take the columns {', '.join(columns) or '(none)'} ({error}): {remedy}"
        raise G2POError(message, field, [*columns]) from error


def is_agent(environment_factory: Callable) -> bool:
    """Return whether a factory is an agent's, as `agent_factory` makes it."""
    return getattr(unwrap_factory(environment_factory), "runs_agent", False)


def constructed(environment_factory: Callable, name: str) -> Any:
    """Return a new environment. Raises `EnvironmentContractError` for an object without `step`."""
    environment = environment_factory()
    if not callable(getattr(environment, "step", None)):
        remedy = "add one; if it has tool methods, pass the class itself, or functools.partial(ToolEnvironment, …)"
        raise EnvironmentContractError(f"{name} is {show(environment)}, which has no step: {remedy}", "step")
    return environment


def validate_observation(value: Any, where: str, limits: PoolLimits | None = None) -> Observation:
    """Return a result as an `Observation`, a string as one without a key and actions; images become `Picture`s.

    `where` names the call. Raises `EnvironmentContractError` for another type, also of a field, and for a longer text,
    more or larger images than the limits allow.
    """
    value = Observation(value) if isinstance(value, str) else value
    _require(isinstance(value, Observation), where, None, value, "an Observation, or its text as a string")
    texts = {"text": _plain_text(value.text, where, "text")}
    for name in ("state_key", "task"):
        text = getattr(value, name)
        texts[name] = None if text is None else _plain_text(text, where, name)
    actions = value.admissible_actions
    if actions is not None:
        actions = actions.tolist() if hasattr(actions, "tolist") else actions
        are_texts = isinstance(actions, (list, tuple)) and all(isinstance(action, str) for action in actions)
        _require(are_texts, where, "Observation.admissible_actions", actions, "a list of strings, or None")
        _plain_text("".join(actions), where, "admissible_actions")  # one check instead of one for each
        actions = [str.__str__(action) for action in actions]
    is_request = value.request is None or isinstance(value.request, ChatRequest)
    _require(is_request, where, "Observation.request", value.request, "a ChatRequest, or None")
    images = _pictures(value, where)
    sizes = {"max_observation_characters": len(texts["text"]), "max_observation_images": len(images)}
    sizes["max_image_pixels"] = max((math.prod(one.size) for one in images), default=0)
    for name, size in sizes.items():
        if (limit := getattr(limits, name, None)) is not None and size > limit:
            what = f"{where}: the observation has {size} {name.rpartition('_')[2]}, more than {name}={limit}"
            raise EnvironmentContractError(f"{what}: make it smaller, or raise the limit", name, size)
    if images and texts["state_key"] is None:
        texts["state_key"] = "\n".join([texts["text"], *images])
    # A new object: a subclass may not unpickle in the trainer.
    return Observation(admissible_actions=actions, request=value.request, images=images, **texts)


def _pictures(seen: Observation, where: str) -> tuple[Picture, ...]:
    """Return the images of an observation; of a request, those of the messages since the last completion."""
    field, given = "Observation.images", seen.images
    if seen.request is not None:
        pictures = pictures_of(since_last_completion(seen.request.messages))
        _require(list(given) in ([], pictures), where, field, given, "them in the request")
        return tuple(pictures)
    _require(isinstance(given, (list, tuple)), where, field, given, "a list of images")
    try:
        return tuple(as_picture(image, f"{where}: an image") for image in given)
    except G2POError as error:
        raise EnvironmentContractError(str(error), field, given) from error


def validate_step(value: Any, where: str, limits: PoolLimits | None = None) -> StepResult:
    """Return the value as a `StepResult` with an `Observation` and a float reward. See `validate_observation`."""
    _require(isinstance(value, StepResult), where, None, value, "StepResult(observation, reward, terminated)")
    reward = to_plain(value.reward)
    _require(is_of_kind(reward, float), where, "reward", value.reward, "a finite number")
    for name in ("terminated", "truncated"):
        is_bool = type(getattr(value, name)).__name__ in ("bool", "bool_")  # also numpy's, by version
        _require(is_bool, where, name, getattr(value, name), "True or False")
    observation = validate_observation(value.observation, where, limits)
    info = _validate_info(value.info, where)
    return StepResult(observation, float(reward), bool(value.terminated), bool(value.truncated), info)


def _validate_info(info: Any, where: str) -> dict[str, Any]:
    """Return the info as plain data, since trajectories are written as JSON."""
    try:
        data = to_plain(info) if isinstance(info, dict) else None
    except Exception:  # a reference cycle, or an object whose text cannot be computed
        data = None
    _require(data is not None, where, "info", info, "a dict of plain data, which is written as JSON")
    for name, score in data.items():
        fits = is_of_kind(score, float) or not is_score(name)
        wanted = "a finite number, or rename it: evaluations report the mean"
        _require(fits, where, f"info[{name!r}]", info.get(name, score), wanted)
    success = data.pop("success", None)  # `None` is unknown: the reward decides
    _require(success in (True, False, None), where, "info['success']", success, "True or False")
    return data if success is None else {"success": success, **data}


def _require(valid: bool, where: str, field: str | None, value: Any, wanted: str) -> None:
    """Raise `EnvironmentContractError` unless valid; `field`: `None` for all that the call at `where` returned."""
    if not valid:
        what = f"{where} returned" if field is None else f"{where}: {field} is"
        raise EnvironmentContractError(f"{what} {show(value)}; give {wanted}", field or where, value)


def _plain_text(value: Any, where: str, name: str) -> str:
    field = f"Observation.{name}"
    _require(isinstance(value, str), where, field, value, "a string")
    is_unicode = value.isascii() or value.encode("utf-8", "replace").decode() == value
    _require(is_unicode, where, field, value, 'valid unicode, as text.encode("utf-8", "replace").decode()')
    return str.__str__(value)  # a subclass may not unpickle in the trainer
