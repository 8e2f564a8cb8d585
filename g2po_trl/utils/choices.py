"""Choices of an option by name: classes that are imported on first use, each with options of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, cleandoc, signature
from typing import Any, ClassVar

from .options import check_options


def load_name(path: str) -> Any:
    """Return what `module:name` names inside the package, imported on first use."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"{__package__.partition('.')[0]}.{module}"), name)


@dataclass(frozen=True)
class Choice:
    """A class that an option names.

    Its own options are the keyword-only parameters of `method`, whose docstring, or the class's, describes them.
    """

    path: str  # `module:class` inside the package
    help: str  # in one line, for the help and the documentation
    method: ClassVar[str] = "__init__"

    def load(self) -> type:
        """Return the class, imported on first use."""
        return load_name(self.path)

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
        text = cleandoc(getattr(row.load(), row.method).__doc__ or row.load().__doc__)
        help_of = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE))
        options = [f"`{option}` ({default!r}), {help_of[option]}" for option, default in row.options.items()]
        described += [f"`{name}`:", *options] if options else []
    return " ".join(" ".join([*described, "As a flag: JSON."]).split())


def check_choice(choices: Mapping[str, Choice], field: str, args: Any) -> None:
    """Refuse options in `{field}_kwargs` that the choice does not have, and settings that its `check` excludes."""
    name, options = getattr(args, field), getattr(args, f"{field}_kwargs") or {}
    check_options(f"{field}_kwargs", options, choices[name].options, f"{field}={name!r}")
    choices[name].load().check(args, **options)
