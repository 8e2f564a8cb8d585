"""Types of values that users set, and fields that hold options as an object, such as `estimator_kwargs`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

KINDS = {bool: "truth value", float: "number", int: "whole number", str: "string"}


class _Metadata(dict):
    """A field's metadata, of which argument parsers of other libraries see only what they take."""

    def keys(self) -> Iterable[str]:
        return [name for name in super().keys() if name in ("help", "choices", "aliases")]

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in self.keys()}


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """Return a dataclass field of an option; a list or dictionary as default is copied. Without default: required."""
    metadata = _Metadata(help=help, **metadata)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=partial(type(default), default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def without_numpy(value: Any) -> Any:
    """Return a numpy scalar as Python's, also as a value of a dictionary; any other value as it is."""
    if isinstance(value, dict):
        return {name: without_numpy(one) for name, one in value.items()}
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def is_of_kind(value: Any, kind: type) -> bool:
    """Return whether a value is a truth value, a finite number, a whole number or a string: `kind` of `KINDS`."""
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def option_text(value: Any) -> str:
    """Return an option that transformers keeps as a text or as an enumeration, such as `optim`, as a text."""
    return str(getattr(value, "value", value))


def require(condition: bool, name: str, value: Any, remedy: str) -> None:
    """Refuse the value of an option unless the condition is met."""
    if not condition:
        raise ValueError(f"{name} is {value!r}: {remedy}.")


def as_mapping(name: str, value: Any) -> dict[str, Any] | None:
    """Return the value of a field that is an object, or JSON text of one. An empty one is `None`."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = value
    if given is not None and not isinstance(given, dict):
        raise ValueError(f'{name} is {value!r}: write {{"option": value}}, or None.')
    return given or None


def check_options(field: str, given: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> None:
    """Refuse options that the owner does not have, and values of another type than the default's.

    Any value is accepted if the default is not a bool, number or string. `field` and `owner` are for messages.
    """
    for option, value in given.items():
        if option not in defaults:
            near = difflib.get_close_matches(str(option), defaults, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = f"its options are {', '.join(defaults)}" if defaults else "it has no options"
            raise ValueError(f"{field} has {option!r}, which {owner} does not have; {hint}{known}")
        kind = type(defaults[option])
        if kind in KINDS and not is_of_kind(value, kind):
            raise ValueError(f"{field} has {option}={value!r}: set it to a {KINDS[kind]}")
