"""Fields that hold options as an object, such as `estimator_kwargs`: names and types are checked by their defaults."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

_KINDS = {bool: "truth value", float: "number", int: "whole number", str: "string"}


def as_mapping(name: str, value: Any) -> dict[str, Any] | None:
    """Return the value of a field that is an object, or JSON text of one. An empty one is `None`.

    Raises:
        ValueError: for any other value.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = value
    if given is not None and not isinstance(given, dict):
        raise ValueError(f'{name} is {value!r}: write {{"option": value}}, or None.')
    return given or None


def check_options(field: str, given: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> None:
    """Refuse options that the owner does not have, and values of another type than the default's.

    Args:
        field: of the configuration, for messages.
        given: option -> value.
        defaults: option -> default. Any value is accepted if the default is not a bool, number or string.
        owner: the object with these options, for messages.

    Raises:
        ValueError: for the first such option.
    """
    for option, value in given.items():
        if option not in defaults:
            near = difflib.get_close_matches(option, defaults, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = f"its options are {', '.join(defaults)}" if defaults else "it has no options"
            raise ValueError(f"{field} has {option!r}, which {owner} does not have; {hint}{known}")
        kind = type(defaults[option])
        is_right = isinstance(value, (int, float) if kind is float else kind)
        if kind in _KINDS and not (is_right and (kind is bool or not isinstance(value, bool))):
            raise ValueError(f"{field} has {option}={value!r}: set it to a {_KINDS[kind]}")
