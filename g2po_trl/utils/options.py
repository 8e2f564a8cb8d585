"""Options: dataclass fields that carry help, range and use, and check themselves.

A `Choice` is a class that an option names, imported on first use, with options of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache, partial
from inspect import Parameter, cleandoc, signature
from pkgutil import resolve_name
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from .errors import G2POError

KINDS = {bool: "truth value", float: "number", int: "whole number", str: "string"}


class _Metadata(dict):
    """Metadata of a field; argument parsers of other libraries see only the keys that they take."""

    def keys(self) -> Iterable[str]:
        return [name for name in super().keys() if name in ("help", "choices")]

    def copy(self) -> dict[str, Any]:  # by which older transformers read it
        return {name: self[name] for name in self.keys()}


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """Return the field of an option; a list or dictionary as default is copied. Without default it is required.

    Args:
        help: description for the command line and the documentation.
        default: its default.
        **metadata: `choices`; `within`, the interval of a number, e.g. "(0, 1]" or "[1, inf)"; `group`, its heading in
            the documentation; `resumable`, whether a resumed run may have another value; `read_again`, whether a
            trainer notices a change; `plays`, whether evaluations of the run play with it; and what readers name.
    """
    absent = {"within": None, "group": None, **dict.fromkeys(("resumable", "read_again", "plays"), False)}
    metadata = _Metadata(absent | metadata, help=help)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=partial(type(default), default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of dataclasses whose fields are made by `option`; values are checked when an object is created."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if "within" in field.metadata:
                value, hint = getattr(self, field.name), hints_of(type(self))[field.name]
                if {dict, str} <= {get_origin(kind) or kind for kind in kinds_of(hint)}:
                    value = as_mapping(field.name, value)
                setattr(self, field.name, value)
                check_value(field.name, value, hint, field.metadata)
        if after := getattr(super(), "__post_init__", None):  # of a class that the options are mixed into
            after()

    @classmethod
    def of(cls, args: Any, **changes: Any) -> Self:
        """Return the options among the attributes of `args`, with changes; missing ones have their defaults."""
        names = [field.name for field in dataclasses.fields(cls) if hasattr(args, field.name)]
        return cls(**{name: getattr(args, name) for name in names} | changes)


@cache
def hints_of(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)  # `field.type` is changed by transformers' argument parser


def kinds_of(hint: Any) -> list[Any]:
    """Return the types of a field's value, without `None`."""
    return [it for it in get_args(hint) if it is not type(None)] if get_origin(hint) in (Union, UnionType) else [hint]


def check_value(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a value of another type than the field's, out of range, or not among the choices."""
    may_be_none, kinds = type(None) in get_args(hint), kinds_of(hint)
    choices, within = metadata.get("choices"), metadata.get("within")
    is_list = get_origin(kinds[0]) is list
    kind = get_args(kinds[0])[0] if is_list else kinds[0]
    if (value is None and may_be_none) or len(kinds) > 1 or kind not in KINDS:
        return

    def fits(part: Any) -> bool:
        return is_of_kind(part, kind) and (not choices or part in choices) and (not within or _is_in(part, within))

    what = f"one of {', '.join(map(str, choices))}" if choices else f"a {KINDS[kind]}"
    what = f"{'a list, each ' if is_list else ''}{what}{f' in {within}' if within else ''}"
    all_fit = isinstance(value, (list, tuple)) and all(map(fits, value)) if is_list else fits(value)
    require(all_fit, name, value, f"set it to {what}{', or to None' if may_be_none else ''}")


def _is_in(value: float, within: str) -> bool:
    low, high = map(float, within[1:-1].split(","))
    return low < value < high or value == low and within[0] == "[" or value == high and within[-1] == "]"


def without_effect(given: Collection[str], values: Mapping[str, Any], needs: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each option that is given while its condition, in `needs`, is not met by all `values`.

    A condition is a field that is set, or `field=pattern`; "|" separates alternatives.
    """
    for name in given:
        condition = needs.get(name, "")
        if condition and not any(_is_met(part, values) for part in condition.split("|")):
            yield f"{name} has no effect without {condition.replace('|', ' or ').replace('*', '')}"


def switches_of(condition: str) -> set[str]:
    """Return the names of the options that a condition is about."""
    return {part.partition("=")[0] for part in condition.split("|")}


def _is_met(condition: str, values: Mapping[str, Any]) -> bool:
    name, equals, pattern = condition.partition("=")
    if name not in values:
        return True
    return fnmatch(option_text(values[name]), pattern) if equals else values[name] not in (None, False, "no", 0, [])


def is_of_kind(value: Any, kind: type) -> bool:
    """Return whether a value is a truth value, a finite number, a whole number or a string: `kind` of `KINDS`."""
    if kind is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and abs(value) <= sys.float_info.max  # not so NaN, nor larger integers
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def option_text(value: Any) -> str:
    """Return the text of an option that transformers stores as a string or an enumeration, such as `optim`."""
    return str(getattr(value, "value", value))


def require(condition: bool, name: str, value: Any, remedy: str) -> None:
    """Refuse the value of an option unless the condition is met."""
    if not condition:
        raise G2POError(f"{name} is {value!r}: {remedy}", name, value)


def as_mapping(name: str, value: Any) -> dict[str, Any] | None:
    """Return the value of a field that is an object, or JSON text of one. An empty one is `None`."""
    with suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    require(value is None or isinstance(value, Mapping), name, value, 'write {"option": value}, or None')
    return dict(value or {}) or None


def check_options(field: str, given: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> None:
    """Refuse options that the owner does not have, required ones that are missing, and values of another type."""
    for option, value in given.items():
        near = difflib.get_close_matches(str(option), defaults, 1)
        known = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(defaults) or 'none'}"
        require(option in defaults, field, given, f"{owner} has no {option!r}; {known}")
        kind = type(defaults[option])
        require(kind not in KINDS or is_of_kind(value, kind), field, given, f"set {option} to a {KINDS.get(kind)}")
    for option, default in defaults.items():
        require(option in given or default is not Parameter.empty, field, given, f"{owner} needs {option}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A class that an option names.

    Its own options are the keyword-only parameters of `method`, whose docstring, or the class's, describes them.
    """

    path: str  # `module:class` inside the package
    help: str  # in one line, for the help and the documentation
    method: ClassVar[str] = "__init__"

    def load(self) -> type:
        """Return the class, imported on first use."""
        return resolve_name(f"g2po_trl.{self.path}")

    @property
    def options(self) -> dict[str, Any]:
        """Names of the class's own options, with their defaults."""
        parameters = signature(getattr(self.load(), self.method)).parameters.values()
        return {one.name: one.default for one in parameters if one.kind is Parameter.KEYWORD_ONLY}


def choices_help(choices: Mapping[str, Choice]) -> str:
    """Return the help of an option that names a choice, after its first sentence."""
    return " ".join(f'`"{name}"`: {row.help}.' for name, row in choices.items())


def kwargs_help(choices: Mapping[str, Choice]) -> str:
    """Return the help of the choices' own options, as signatures and docstrings have them."""
    described = []
    for name, row in choices.items():
        text = "\n".join(cleandoc(one.__doc__ or "") for one in (row.load(), getattr(row.load(), row.method)))
        help_of = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE))
        options = [f"`{option}` ({default!r}), {help_of[option]}" for option, default in row.options.items()]
        described += [f"`{name}`:", *options] if options else []
    return " ".join(" ".join([*described, "As a flag: JSON."]).split())


def check_choice(choices: Mapping[str, Choice], field: str, args: Any) -> None:
    """Refuse options in `{field}_kwargs` that the choice does not have, and settings that its `check` excludes."""
    name, options = getattr(args, field), getattr(args, f"{field}_kwargs") or {}
    check_options(f"{field}_kwargs", options, choices[name].options, f"{field}={name!r}")
    choices[name].load().check(args, **options)
