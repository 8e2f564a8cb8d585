"""One command line for every command and recipe: flags and YAML keys from the fields of dataclasses.

    options, given = parse((Options,), argv, command="g2po play")

A field is a flag (`max_turns`: `--max-turns` or `--max_turns`) and a YAML key. Its annotation gives the type, its
metadata the help; further keys of the metadata:

- `positional`: an argument without a flag,
- `group`: heading in the help; without one, the class that declares the field,
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
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from ..utils.errors import G2POError
from ..utils.options import kinds_of
from ..utils.options import option as option  # for options of commands

COMMAND: str | None = None  # of this process, where it runs a recipe; for messages
COMMAND_FLAGS: Sequence[str] = ()  # that the command takes itself, for suggestions
_METAVARS = {int: "N", float: "X", Path: "PATH", dict: "JSON", str: "TEXT"}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "name: value"}
_BOOLEANS = dict.fromkeys(("true", "yes", "t", "y", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "f", "n", "0"), False)
_ALIASES = {"model_name_or_path": "--model", "replay": "--from"}
# Names of options in other libraries -> ours.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "group_size": "num_generations",
}


def parse(types: Sequence[type], argv: Sequence[str] | None = None, **options: Any) -> tuple[Any, ...]:
    """Return an object of each dataclass, and the names of the fields that flags or the YAML file set.

    `options` are those of `read`.

    Raises:
        SystemExit: as `read` does, and with 2 for a value that a dataclass refuses, or one that is missing.
    """
    parser, values, given = read(types, argv, **options)
    try:
        return (*parser.build(values), given)
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
        flags = parser.read_flags(sys.argv[1:] if argv is None else argv)
        if "config" in flags and find_config is not None:
            keys = read_config(find_config(flags.pop("config")))
        else:
            keys = default_config(flags) if callable(default_config) else read_config(default_config)
        keys = parser.read_keys(keys)
        given = {**keys, **flags}
        if help_ := {"help", "help_all"} & flags.keys():
            with contextlib.suppress(ValueError):  # without a model, say, there are no defaults of its run
                given = {**(defaults(given) if callable(defaults) else defaults or {}), **given}
            print(parser.help_with(given) if short_help is None or "help_all" in help_ else short_help, end="")
            raise SystemExit(0)
        return parser, {**(defaults(given) if callable(defaults) else defaults or {}), **given}, set(given)
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
        found = list(_fields(types))
        self.of_others = {field.name for field, *_ in found if "within" not in field.metadata}  # not made by `option`
        groups = {title: self.add_argument_group(title) for title in _titles(found, types) if title}
        help_of = {name: text for one in types for name, text in getattr(one, "inherited_help", {}).items()}
        for field, hint, title in found:
            self.kinds[field.name] = kinds = kinds_of(hint)
            group = groups.get(title, self)
            described = _described(field, kinds)
            if field.name in help_of:
                described["help"] = help_of[field.name].replace("%", "%%")
            if field.metadata.get("positional"):
                described["nargs"] = "*" if described.pop("action", None) else "?"
                described["metavar"] = field.metadata.get("metavar", field.name.upper())
                action = group.add_argument(field.name, default=None, **described)
            else:
                names = [_flag(field.name), *([_ALIASES[field.name]] if field.name in _ALIASES else [])]
                action = group.add_argument(*names, **described)
            self.arguments[field.name] = action
        places = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *places, "[--FLAG VALUE ...]"])

    def error(self, message: str) -> NoReturn:
        if environ.get("RANK", "0") != "0":
            self.exit(2)
        message = re.sub(r"^argument (-*[\w-]+)\S*: ", r"\1: ", message)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def read_flags(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values of the flags in `argv` by field."""
        values, unknown = self.split(argv)
        if unknown and not {"help", "help_all"} & values.keys():
            known = [name for name in self._option_string_actions if name.startswith("--")]
            raise G2POError(_unknown(unknown[0], [*known, *COMMAND_FLAGS], "a flag"))
        return values

    def split(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the flags in `argv` by field, and all words that belong to no flag."""
        found, unknown = self.parse_known_args(list(self._spelled(argv)))
        values = {name: value for name, value in vars(found).items() if value is not None and value != []}
        return {name: self._unwrapped(name, value) for name, value in values.items()}, unknown

    def _spelled(self, argv: Sequence[str]) -> Iterator[str]:
        """Yield the words in the parser's spelling: kebab case, `--no-flag` for `--flag false`."""
        words = list(argv)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name not in self._option_string_actions:
                yield word
                continue
            if not isinstance(self._option_string_actions[name], argparse.BooleanOptionalAction):
                yield f"{name}{equals}{value}"
                continue
            if not equals and words and words[0].lower() in _BOOLEANS:
                value = words.pop(0)
            if value and value.lower() not in _BOOLEANS:
                raise G2POError(f"{name} is {value!r}: write true or false")
            yield name if _BOOLEANS[value.lower() or "true"] else f"--no-{name.removeprefix('--')}"

    def _unwrapped(self, name: str, value: Any) -> Any:
        """Return the only element of a list if the field takes a string or a list."""
        either = {str, list} <= {get_origin(kind) or kind for kind in self.kinds.get(name, ())}
        return value[0] if either and len(value) == 1 else value

    def read_keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a YAML file by field."""
        aliases = {alias.removeprefix("--"): name for name, alias in _ALIASES.items() if name in self.arguments}
        if both := next((alias for alias, name in aliases.items() if {alias, name} <= keys.keys()), None):
            raise G2POError(f"config has {both} and {aliases[both]}, which are the same: remove one")
        keys = {aliases.get(name, name): value for name, value in keys.items()}
        if unknown := next((name for name in keys if name not in self.arguments), None):
            raise G2POError(_unknown(unknown, self.arguments, "a key of the config file"))
        return {name: self._converted(name, value) for name, value in keys.items()}

    def _converted(self, name: str, value: Any) -> Any:
        """Return a value of a YAML file in the field's type."""
        kinds = self.kinds[name]
        enums = [kind for kind in kinds if isclass(kind) and issubclass(kind, Enum)]
        if value is False and any(member.value == "no" for kind in enums for member in kind):
            return "no"  # which YAML reads as false
        if value is None or len(kinds) > 1:
            return value
        if get_origin(kinds[0]) is list and isinstance(value, (list, str)):
            (kind,) = get_args(kinds[0])
            parts = [value] if isinstance(value, str) else value  # all-linear of lora_target_modules
            return [self._converted_one(name, one, kind) for one in parts]
        return self._converted_one(name, value, kinds[0])

    def _converted_one(self, name: str, value: Any, kind: Any) -> Any:
        kind = get_origin(kind) or kind
        if not isclass(kind) or issubclass(kind, Enum):
            return value
        if kind is str and name in self.of_others and isinstance(value, (bool, int, float)):
            return value  # as in TRL, whose annotations are narrower than what it takes: scale_rewards: false
        if kind is bool and isinstance(value, str):
            value = _BOOLEANS.get(value.lower(), value)
        elif isinstance(value, str):
            try:
                value = self._get_value(self.arguments[name], value)
                self._check_value(self.arguments[name], value)
            except argparse.ArgumentError as error:
                raise G2POError(f"{name} is {value!r}: {error.message}") from error
        accepted = {float: (int, float), Path: (str, Path), dict: Mapping}.get(kind, kind)
        if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
            raise G2POError(f"{name} is {value!r}: write {_EXPECTED.get(kind, 'a string')}")
        return value

    def build(self, values: Mapping[str, Any]) -> Iterator[Any]:
        """Yield an object of each dataclass."""
        for one in self.types:
            fields = [field for field in dataclasses.fields(one) if field.init]
            for field in fields:
                if field.name not in values and _default(field) is dataclasses.MISSING:
                    action = self.arguments[field.name]
                    name = (action.option_strings or [action.metavar])[0]
                    raise G2POError(f"{name} is missing: {field.metadata.get('help', '')}")
            yield one(**{field.name: values[field.name] for field in fields if field.name in values})

    def field_defaults(self) -> dict[str, Any]:
        """Return the fields' own defaults, `None` for those without."""
        found = {field.name: _default(field) for one in self.types for field in dataclasses.fields(one) if field.init}
        return {name: None if value is dataclasses.MISSING else value for name, value in found.items()}

    def help_with(self, values: Mapping[str, Any]) -> str:
        """Return the help, with the values as defaults."""
        for field in {field.name: field for one in self.types for field in dataclasses.fields(one)}.values():
            action = self.arguments.get(field.name)
            value = values.get(field.name, _default(field))
            if action and value not in (None, dataclasses.MISSING, "", [], {}, False):
                action.help += f" (default: {getattr(value, 'value', value)})".replace("%", "%%")
            elif isinstance(action, argparse.BooleanOptionalAction):
                action.option_strings = action.option_strings[:1]
        return self.format_help()


def _fields(types: Iterable[type]) -> Iterator[tuple[dataclasses.Field, Any, str | None]]:
    """Yield the fields of dataclasses, with their types and the title of their group in the help."""
    names = set()
    for one in types:
        hints = get_type_hints(one)
        for field in dataclasses.fields(one):
            if field.init and field.name not in names:
                names.add(field.name)
                yield field, hints[field.name], field.metadata.get("group") or _owner(one, field.name)


def _owner(one: type, name: str) -> str | None:
    """Return the class that first declares a field, as a title; `None` for a class of a command or script."""
    owner = next(base for base in reversed(one.__mro__) if name in vars(base).get("__annotations__", {}))
    package = owner.__module__.partition(".")[0]
    if package in ("trl", "transformers"):
        return f"{owner.__name__.lstrip('_')} ({package})"
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", owner.__name__)
    words = words if words.endswith("Config") else words.lower()
    return None if ".cli." in owner.__module__ or package != "g2po_trl" else words


def _titles(found: Sequence[tuple], types: Sequence[type]) -> list[str]:
    """Return the titles of the help's groups: those of this project first, then TRL's, then transformers'."""
    titles = list(dict.fromkeys(title for *_, title in found))
    return sorted(filter(None, titles), key=lambda title: 2 * ("(transformers)" in title) + ("(trl)" in title))


def _described(field: dataclasses.Field, kinds: list[Any]) -> dict[str, Any]:
    """Return a field's arguments of `add_argument`."""
    metadata = field.metadata
    options = {name: metadata[name] for name in ("choices", "nargs", "const") if name in metadata}
    options["help"] = str(metadata.get("help", "")).replace("%", "%%")
    kind = next((kind for kind in kinds if (get_origin(kind) or kind) in (list, bool)), kinds[0])
    enum = next((kind for kind in kinds if isclass(kind) and issubclass(kind, Enum)), None)
    if kind is bool and str not in kinds:
        return {"action": argparse.BooleanOptionalAction, "help": options["help"]}
    if get_origin(kind) is list:
        options = {"action": "extend", "nargs": "+", **options}
        kind = get_args(kind)[0]
    elif len(kinds) > 1:
        kind = str
    if enum is not None:
        options.setdefault("choices", [member.value for member in enum])
    if get_origin(kind) is Literal:
        options.setdefault("choices", get_args(kind))
        kind = type(get_args(kind)[0])
    kind = get_origin(kind) or kind
    if not options.get("choices"):
        options["metavar"] = metadata.get("metavar") or _METAVARS.get(kind, "TEXT")
    elif "metavar" in metadata:
        options["metavar"] = metadata["metavar"]
    if kind in (int, float, Path):
        options["type"] = kind
    elif kind in (dict, Mapping):
        options["type"] = json_object
    return options


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _unknown(word: str, known: Iterable[str], where: str) -> str:
    """Return the message about an unknown flag or key, with the nearest known one."""
    word, known = word.partition("=")[0], list(known)
    if where == "a flag" and not word.startswith("-"):
        return f"{word!r} does not belong to a flag: --help lists the flags"
    usual = _OTHER_NAMES.get(word.lstrip("-").replace("-", "_"))
    near = [name for name in known if name.lstrip("-").replace("-", "_") == usual]
    near = near or difflib.get_close_matches(word, known, 1)
    return f"{word} is not {where}: {f'did you mean {near[0]}?' if near else '--help lists the flags'}"


def _flag(name: str) -> str:
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
        text = Path(path).read_text(encoding="utf-8")
        keys, document = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise G2POError(f"{field} is {str(path)!r}, which cannot be read: {reason}") from error
    if not isinstance(keys, dict) or not all(isinstance(name, str) for name in keys):
        raise G2POError(f"{field} is {str(path)!r}, without fields: write one per line, like max_steps: 100")
    names = [key.value.replace("-", "_") for key, _ in document.value]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise G2POError(f"{field} is {str(path)!r}, which has {twice} twice: remove one")
    return {name.replace("-", "_"): value for name, value in keys.items()}
