"""One command line for every command and recipe: flags and YAML keys from the fields of dataclasses.

    options, given = parse((Options,), argv, command="g2po play")

A field is a flag (`max_turns`: `--max-turns` or `--max_turns`) and a YAML key. Its annotation gives the type, its
metadata the help; further keys of the metadata:

- `positional`: an argument without a flag,
- `needs`: the condition under which it has an effect, see `without_effect`,
- `group`: heading in the help; without one, the library that declares the field,
- `metavar`, `choices`, `nargs`, `const`: as in argparse.

A class may replace the help of fields that it inherits: `inherited_help`, name -> text.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from inspect import isclass
from os import environ
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from ..utils.errors import G2POError
from ..utils.options import kinds_of, require, without_effect
from ..utils.options import option as option  # for options of commands

COMMAND: str | None = None  # of this process, where it runs a recipe; for messages
COMMAND_FLAGS: Sequence[str] = ()  # that the command takes itself, for suggestions
ALIASES = {"model_name_or_path": "--model"}
_METAVARS = {int: "N", float: "X", Path: "PATH", dict: "JSON"}
_BOOLEANS = dict.fromkeys(("true", "yes", "t", "y", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "f", "n", "0"), False)


def parse(types: Sequence[type], argv: Sequence[str] | None = None, **options: Any) -> tuple[Any, ...]:
    """Return an object of each dataclass, and the names of the fields that flags or the YAML file set.

    `options` are those of `read`.

    Raises:
        SystemExit: as `read` does, and with 2 for a value that a dataclass refuses, or one that is missing.
    """
    parser, values, given = read(types, argv, **options)
    try:
        built = tuple(parser.build(values))
        needs = {field.name: field.metadata.get("needs", "") for field, *_ in _fields(types)}
        for sentence in without_effect(
            sorted(given), {name: one for part in built for name, one in vars(part).items()}, needs
        ):
            raise G2POError(f"{sentence}: add it, or leave the option out", sentence.split()[0])
        return (*built, given)
    except ValueError as error:
        parser.error(str(error))


def read(
    types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    command: str | None = None,
    description: str | None = None,
    short_help: str | None = None,
    find_config: Callable[[str], Path] | None = None,
    default_config: Path | Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    defaults: Mapping[str, Any] | Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> tuple[Parser, dict[str, Any], set[str]]:
    """Return the parser, the values of fields, and the names of those that flags or the YAML file set.

    A value is taken from the flags, else the YAML file, else `defaults`, else the field's default.

    Args:
        types: the dataclasses. Fields of the same name are one flag.
        argv: the words of the command line. Default: this process's.
        command: the command's name in messages. Default: `COMMAND`, else the script's name.
        description: for the help.
        short_help: what `--help` prints. `None`: the help of `--help-all`, with every flag and its default.
        find_config: returns the file of the text after `--config`. `None`: the command has no `--config`.
        default_config: the YAML file without `--config`, or a function that returns its keys from the flags' values.
        defaults: field -> value, or a function that returns it from the values that flags and YAML file set.

    Raises:
        SystemExit: 0 after a help, 2 for an unknown flag or key, and for a value of another type.
    """
    parser = Parser(types, prog=command or COMMAND, description=description)
    if find_config is not None:
        parser.add_argument("--config", metavar="FILE", help="YAML file with these options; flags override it")
    shown = argparse.SUPPRESS if short_help is None else "print every flag with its default"
    parser.add_argument("--help-all", action="store_true", help=shown)
    try:
        flags, unknown = parser.split(sys.argv[1:] if argv is None else argv)
        help_ = {"help", "help_all"} & flags.keys()
        if unknown and not help_:
            raise G2POError(unknown_name(unknown[0], [*parser.flags(), *COMMAND_FLAGS], "a flag"), unknown[0])
        if "config" in flags and find_config is not None:
            keys = read_config(find_config(flags.pop("config")))
        else:
            keys = default_config(flags) if callable(default_config) else read_config(default_config)
        given = {**parser.read_keys(keys), **flags}
        others = defaults if callable(defaults) else lambda given: defaults or {}
        if help_:
            with contextlib.suppress(ValueError):  # without a model, say, there are no defaults of its run
                given = {**others(given), **given}
            print(parser.help_with(given) if short_help is None or "help_all" in help_ else short_help, end="")
            raise SystemExit(0)
        return parser, {**others(given), **given}, set(given)
    except ValueError as error:
        parser.error(str(error))


class Parser(argparse.ArgumentParser):
    """The flags of dataclasses. Use `parse` instead of this class."""

    def __init__(self, types: Sequence[type], takes_help: bool = True, **options: Any):
        shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)
        options |= {"formatter_class": shape, "add_help": False, "allow_abbrev": False}
        super().__init__(argument_default=argparse.SUPPRESS, **options)
        if takes_help:
            self.add_argument("-h", "--help", action="store_true", help="print this help")
        self.types, self.kinds, self.arguments = types, {}, {}
        fields = list(_fields(types))
        titles = dict.fromkeys(title for *_, title in fields if title)  # in the fields' order
        titles = sorted(titles, key=lambda title: title.startswith("of "))
        groups = {title: self.add_argument_group(title) for title in titles}
        help_of = {name: text for one in types for name, text in getattr(one, "inherited_help", {}).items()}
        for field, hint, title in fields:
            self.kinds[field.name] = kinds = kinds_of(hint)
            described = _described(field, kinds, help_of.get(field.name, field.metadata.get("help", "")))
            names = [flag(field.name), *([ALIASES[field.name]] if field.name in ALIASES else [])]
            if field.metadata.get("positional"):
                names, described["nargs"] = [field.name], "*" if described.pop("action", None) else "?"
                described |= {"metavar": field.metadata.get("metavar", field.name.upper()), "default": None}
            self.arguments[field.name] = groups.get(title, self).add_argument(*names, **described)
        places = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *places, "[--FLAG VALUE ...]"])

    def error(self, message: str) -> NoReturn:
        if environ.get("RANK", "0") != "0":
            self.exit(2)
        message = re.sub(r"^argument (-*[\w-]+)\S*: ", r"\1: ", message)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def flags(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    def split(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the flags in `argv` by field, and all words that belong to no flag."""
        parsed, unknown = self.parse_known_args(list(self._spelled(argv)))
        values = {name: value for name, value in vars(parsed).items() if value is not None and value != []}
        for name, value in values.items():
            if {str, list} <= {get_origin(kind) or kind for kind in self.kinds.get(name, ())} and len(value) == 1:
                values[name] = value[0]
        return values, unknown

    def _spelled(self, argv: Sequence[str]) -> Iterator[str]:
        """Yield the words in the parser's spelling: kebab case, `--no-flag` for `--flag false`."""
        words = list(argv)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            action = self._option_string_actions.get(name := name.replace("_", "-"))
            if not isinstance(action, argparse.BooleanOptionalAction):
                yield f"{name}{equals}{value}" if action else word
                continue
            if not equals and words and words[0].lower() in _BOOLEANS:
                value = words.pop(0)
            yield name if _boolean(name, value or "true") else f"--no-{name.removeprefix('--')}"

    def read_keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a YAML file by field."""
        if unknown := next((name for name in keys if name not in self.arguments), None):
            raise G2POError(unknown_name(unknown, self.arguments, "a key of the config file"), "config")
        return {name: self._converted(name, value) for name, value in keys.items()}

    def _converted(self, name: str, value: Any) -> Any:
        """Return a value of a YAML file in the field's type, as the flag has it."""
        action, kinds = self.arguments[name], self.kinds[name]
        if value is False and "no" in (action.choices or ()):  # which YAML reads as false
            return "no"
        if value is None or len(kinds) > 1:
            return value
        if isinstance(action, argparse.BooleanOptionalAction):
            return _boolean(name, str(value))
        is_list = get_origin(kinds[0]) is list
        if action.type is None and not action.choices:  # texts, which own options check themselves
            return [value] if is_list and isinstance(value, str) else value
        parts = value if is_list and isinstance(value, list) else [value]
        try:
            parts = [part if isinstance(part, Mapping) else self._get_value(action, str(part)) for part in parts]
            for part in parts:
                self._check_value(action, part)
        except argparse.ArgumentError as error:
            raise G2POError(f"{name} is {value!r}: {error.message}", name, value) from error
        return parts if is_list else parts[0]

    def build(self, values: Mapping[str, Any]) -> Iterator[Any]:
        """Yield an object of each dataclass."""
        for one in self.types:
            fields = [field for field in dataclasses.fields(one) if field.init]
            for field in fields:
                if field.name not in values and _default(field) is dataclasses.MISSING:
                    action = self.arguments[field.name]
                    name = (action.option_strings or [action.metavar])[0]
                    raise G2POError(f"{name} is missing: {field.metadata.get('help', '')}", field.name)
            yield one(**{field.name: values[field.name] for field in fields if field.name in values})

    def help_with(self, values: Mapping[str, Any]) -> str:
        """Return the help, with the values as defaults."""
        for name, default in field_defaults(self.types).items():
            action, value = self.arguments[name], values.get(name, default)
            if value not in (None, "", [], {}, False):
                action.help += f" (default: {getattr(value, 'value', value)})".replace("%", "%%")
            elif isinstance(action, argparse.BooleanOptionalAction):
                action.option_strings = action.option_strings[:1]
        return self.format_help()


def field_defaults(types: Iterable[type]) -> dict[str, Any]:
    """Return the defaults of the dataclasses' fields, `None` for those without."""
    defaults = {field.name: _default(field) for field, *_ in _fields(types)}
    return {name: None if value is dataclasses.MISSING else value for name, value in defaults.items()}


def _fields(types: Iterable[type]) -> Iterator[tuple[dataclasses.Field, Any, str | None]]:
    """Yield the fields of dataclasses, with their types and the title of their group in the help."""
    names = set()
    for one in types:
        hints = get_type_hints(one)
        for field in dataclasses.fields(one):
            if field.init and field.name not in names:
                names.add(field.name)
                yield field, hints[field.name], field.metadata.get("group") or _library(one, field.name)


def _library(owner: type, name: str) -> str | None:
    """Return a title for a field that another library's class declares first."""
    owner = next(base for base in reversed(owner.__mro__) if name in vars(base).get("__annotations__", {}))
    package = owner.__module__.partition(".")[0]
    return f"of {package}'s {owner.__name__.lstrip('_')}" if package in ("trl", "transformers") else None


def _described(field: dataclasses.Field, kinds: list[Any], help_: str) -> dict[str, Any]:
    """Return a field's arguments of `add_argument`."""
    metadata = field.metadata
    options = {name: metadata[name] for name in ("choices", "nargs", "const", "metavar") if name in metadata}
    options["help"] = help_.replace("%", "%%")
    kind = next((kind for kind in kinds if (get_origin(kind) or kind) in (list, bool)), kinds[0])
    if kind is bool and str not in kinds:
        return {"action": argparse.BooleanOptionalAction, "help": options["help"]}
    if get_origin(kind) is list:
        options = {"action": "extend", "nargs": "+", **options}
        kind = get_args(kind)[0]
    elif len(kinds) > 1:
        kind = str
    enums = [kind for kind in kinds if isclass(kind) and issubclass(kind, Enum)]
    if enums:
        options["choices"] = [member.value for member in enums[0]]
    kind = get_origin(kind) or kind
    if not options.get("choices"):
        options.setdefault("metavar", _METAVARS.get(kind, "TEXT"))
    if kind in (int, float, Path, dict):
        options["type"] = json_object if kind is dict else kind
    return options


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _boolean(name: str, text: str) -> bool:
    require(text.lower() in _BOOLEANS, name, text, "write true or false")
    return _BOOLEANS[text.lower()]


def unknown_name(word: str, known: Iterable[str], where: str) -> str:
    """Return the message about an unknown flag or key, with the nearest known one."""
    word = word.partition("=")[0]
    if where == "a flag" and not word.startswith("-"):
        return f"{word!r} does not belong to a flag: --help lists the flags"
    near = difflib.get_close_matches(word, list(known), 1)
    return f"{word} is not {where}: {f'did you mean {near[0]}?' if near else '--help lists the flags'}"


def flag(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raises `ArgumentTypeError` for any other text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object: write {{"name": value}}')
    return value


def read_config(path: str | Path | None, field: str = "config") -> dict[str, Any]:
    """Return the keys of a YAML file; `{}` for `None`. Errors name the `field`."""
    if path is None:
        return {}
    import yaml

    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise G2POError(f"{field} is {str(path)!r}, which cannot be read: {reason}", field, path) from error
    has_fields = isinstance(keys, dict) and all(isinstance(name, str) for name in keys)
    require(has_fields, field, str(path), "it has no fields, write one per line, like max_steps: 100")
    return {name.replace("-", "_"): value for name, value in keys.items()}
