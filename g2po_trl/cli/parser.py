"""One command line for every command and recipe: flags and YAML keys from the fields of dataclasses.

    options, given = parse((Options,), argv, command="g2po play")

A field is a flag (`max_turns`: `--max-turns` or `--max_turns`) and a YAML key. Its annotation gives the type, its
metadata the help; further keys of the metadata:

- `positional`: an argument without a flag,
- `needs`: the condition under which it has an effect, see `without_effect`,
- `group`: heading in the help,
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
from typing import Any, NoReturn, get_args, get_origin

from ..utils.errors import G2POError
from ..utils.options import hints_of, kinds_of, require, without_effect
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
        SystemExit: as `read` does, and with 2 for a value that is refused, is missing, or has no effect.
    """
    parser, values, given = read(types, argv, **options)
    try:
        built = tuple(parser.build(values))
        values = {name: value for part in built for name, value in vars(part).items()}
        needs = {name: field.metadata.get("needs", "") for name, (field, _) in parser.fields.items()}
        for sentence in without_effect(sorted(given), values, needs):
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
    find_config: Callable[[str], Path] | None = None,
    default_config: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda flags: {},
    defaults: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda given: {},
) -> tuple[Parser, dict[str, Any], set[str]]:
    """Return the parser, the values of fields, and the names of those that flags or the YAML file set.

    A value is taken from the flags, else the YAML file, else `defaults`, else the field's default.

    Args:
        types: the dataclasses. Fields of the same name are one flag.
        argv: the words of the command line. Default: this process's.
        command: the command's name in messages. Default: `COMMAND`, else the script's name.
        description: for the help.
        find_config: returns the file of the text after `--config`. `None`: the command has no `--config`.
        default_config: returns the keys of the YAML file without `--config`, from the values of the flags.
        defaults: returns field -> value from the values that flags and YAML file set.

    Raises:
        SystemExit: 0 after a help, 2 for an unknown flag or key, and for a value of another type.
    """
    parser = Parser(types, prog=command or COMMAND, description=description)
    if find_config is not None:
        parser.add_argument("--config", metavar="FILE", help="YAML file with these options; flags override it")
    parser.add_argument("-h", "--help", "--help-all", action="store_true", help="print this help")
    try:
        flags, unknown = parser.split(sys.argv[1:] if argv is None else argv)
        asks_help = flags.pop("help", False)
        if unknown and not asks_help:
            raise G2POError(
                unknown_name(unknown[0], [*parser._option_string_actions, *COMMAND_FLAGS], "a flag"), unknown[0]
            )
        keys = read_config(find_config(flags.pop("config"))) if "config" in flags else default_config(flags)
        given = {**parser.read_keys(keys), **flags}
        if asks_help:
            print(parser.help_with(given), end="")
            raise SystemExit(0)
        return parser, {**defaults(given), **given}, set(given)
    except ValueError as error:
        parser.error(str(error))


class Parser(argparse.ArgumentParser):
    """The flags of dataclasses. Use `parse` instead of this class."""

    def __init__(self, types: Sequence[type], **options: Any):
        shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)
        options |= {"formatter_class": shape, "add_help": False, "allow_abbrev": False}
        super().__init__(argument_default=argparse.SUPPRESS, **options)
        self.types, self.fields, self.arguments = types, _fields(types), {}
        groups: dict[str | None, Any] = {None: self}
        help_of = {name: text for one in types for name, text in getattr(one, "inherited_help", {}).items()}
        for name, (field, kinds) in self.fields.items():
            if (title := field.metadata.get("group")) not in groups:
                groups[title] = self.add_argument_group(title)
            names, described = _described(field, kinds, help_of.get(name, field.metadata.get("help", "")))
            self.arguments[name] = groups[title].add_argument(*names, **described)
        places = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *places, "[--FLAG VALUE ...]"])

    def error(self, message: str) -> NoReturn:
        if environ.get("RANK", "0") != "0":
            self.exit(2)
        message = re.sub(r"^argument (-*[\w-]+)\S*: ", r"\1: ", message)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def split(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the flags in `argv` by field, and all words that belong to no flag."""
        parsed, unknown = self.parse_known_args(list(self._spelled(argv)))
        values = {name: value for name, value in vars(parsed).items() if value is not None and value != []}
        for name in (name for name, value in values.items() if isinstance(value, list) and len(value) == 1):
            values[name] = values[name][0] if str in self.fields[name][1] else values[name]  # a text, or several
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
        """Return a value of a YAML file in the field's type, as the flag has it: "false" is false."""
        action, kinds = self.arguments[name], self.fields[name][1]
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
        missing = self.fields.keys() - values.keys() - field_defaults(self.types).keys()
        for name in sorted(missing):
            action = self.arguments[name]
            raise G2POError(f"{(action.option_strings or [action.metavar])[0]} is missing: {action.help}", name)
        for one in self.types:
            names = [field.name for field in dataclasses.fields(one) if field.init]
            yield one(**{name: values[name] for name in names if name in values})

    def help_with(self, values: Mapping[str, Any]) -> str:
        """Return the help, with the values as defaults."""
        for name, value in {**field_defaults(self.types), **values}.items():
            if name in self.arguments and value not in (None, "", [], {}, False):
                self.arguments[name].help += f" (default: {getattr(value, 'value', value)})".replace("%", "%%")
        return self.format_help()


def field_defaults(types: Iterable[type]) -> dict[str, Any]:
    """Return the defaults of the dataclasses' fields that have one."""
    fields = [field for field, _ in _fields(types).values()]
    found = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    made = {field.name: field.default_factory for field in fields if field.default_factory is not dataclasses.MISSING}
    return found | {name: make() for name, make in made.items()}


def _fields(types: Iterable[type]) -> dict[str, tuple[dataclasses.Field, list[Any]]]:
    """Return the fields of dataclasses by name, with the types of their values."""
    found: dict[str, tuple[dataclasses.Field, list[Any]]] = {}
    for one in types:
        for field in dataclasses.fields(one):
            if field.init:
                found.setdefault(field.name, (field, kinds_of(hints_of(one)[field.name])))
    return found


def _described(field: dataclasses.Field, kinds: list[Any], help_: str) -> tuple[list[str], dict[str, Any]]:
    """Return a field's arguments of `add_argument`."""
    metadata, names = field.metadata, [flag(field.name), *filter(None, [ALIASES.get(field.name)])]
    options = {name: metadata[name] for name in ("choices", "nargs", "const", "metavar") if name in metadata}
    options["help"] = help_.replace("%", "%%")
    kind = next((kind for kind in kinds if get_origin(kind) is list), str if len(kinds) > 1 else kinds[0])
    if kind is bool:
        return names, {"action": argparse.BooleanOptionalAction, "help": options["help"]}
    if get_origin(kind) is list:
        options = {"action": "extend", "nargs": "+", **options}
        (kind,) = get_args(kind)
    kind = get_origin(kind) or kind
    for enum in (kind for kind in kinds if isclass(kind) and issubclass(kind, Enum)):
        options["choices"] = [member.value for member in enum]
    if not options.get("choices"):
        options.setdefault("metavar", _METAVARS.get(kind, "TEXT"))
    if kind in _METAVARS:
        options["type"] = json_object if kind is dict else kind
    if metadata.get("positional"):
        nargs, shown = "*" if options.pop("action", None) else "?", metadata.get("metavar", field.name.upper())
        return [field.name], {**options, "nargs": nargs, "metavar": shown, "default": None}
    return names, options


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
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object: write {{"name": value}}')


def read_config(path: str | Path, field: str = "config") -> dict[str, Any]:
    """Return the keys of a YAML file. Errors name the `field`."""
    import yaml

    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {name.replace("-", "_"): value for name, value in keys.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        remedy = f"write lines like max_steps: 100; it cannot be read ({' '.join(str(error).split())})"
        raise G2POError(f"{field} is {str(path)!r}: {remedy}", field, path) from error
