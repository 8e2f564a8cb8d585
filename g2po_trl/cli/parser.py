"""One command line for every command and recipe: flags and YAML keys from the fields of dataclasses.

    options, given = parse((Options,), argv, command="g2po check")

A field is a flag (`max_turns`: `--max-turns` or `--max_turns`) and a YAML key. Its annotation gives the type, its
metadata the help, and further: `positional`, an argument without a flag; `needs`, the condition under which it has an
effect, see `without_effect`; `group`, a heading of the help; `metavar` and `choices`, as in argparse. A class may
replace the help of fields that it inherits: `inherited_help`, name -> text.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from ..utils.errors import G2POError
from ..utils.json import to_json
from ..utils.options import hints_of, kinds_of, require, without_effect

Keys = Mapping[str, Any]

COMMAND: str | None = None  # of this process, where it runs a recipe; for messages
ALIASES = {"model_name_or_path": "--model"}
_OPTION = re.compile(r"^    ([a-z]\w*): [^\n]*= _?[a-z]\w*\(", re.MULTILINE)
_SOURCES = {  # package -> files with options of recipes
    "g2po_trl": "**/*.py",
    "g2po_envs": "**/*.py",
    "g2po_recipes": "*.py",
    "trl": "trainer/*_config.py",
    "transformers": "training_args.py",
}
_BOOLEANS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raises `ArgumentTypeError` for any other text."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object: write {{"name": value}}')


# Type of a value -> what makes it of a text, and what the help shows for it.
_KINDS = {int: (int, "N"), float: (float, "X"), Path: (Path, "PATH"), dict: (json_object, "JSON")}


def parse(
    types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    command: str | None = None,
    description: str | None = None,
    **sources: Any,
) -> tuple[Any, ...]:
    """Return an object of each dataclass, and the names of the fields that flags or the YAML file set.

    Fields of the same name are one flag. `command` is the name in messages, by default `COMMAND`, else the script's;
    `sources` are further arguments of `Parser.read`.

    Raises:
        SystemExit: 0 after a help, 2 for a flag or key that is unknown, refused, missing or without effect.
    """
    parser = Parser(types, prog=command or COMMAND, description=description)
    try:
        values, given = parser.read(argv, **sources)
        built = tuple(parser.build(values))
        needs = {name: field.metadata.get("needs", "") for name, field in parser.fields.items()}
        check_effect(given, built, needs)
        return (*built, given)
    except ValueError as error:
        parser.error(str(error))


def check_effect(given: Iterable[str], built: Iterable[Any], needs: Mapping[str, str]) -> None:
    """Refuse an option that is given while its condition, in `needs`, is not met by the built objects."""
    values = {name: value for part in built for name, value in vars(part).items()}
    for sentence in without_effect(sorted(given), values, needs):
        raise G2POError(f"{sentence}: add it, or leave the option out", sentence.split()[0])


class Parser(argparse.ArgumentParser):
    """The flags of dataclasses. `parse` also makes the objects and reports errors."""

    def __init__(self, types: Sequence[type], **options: Any):
        shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)
        options |= {"formatter_class": shape, "add_help": False, "allow_abbrev": False}
        super().__init__(argument_default=argparse.SUPPRESS, **options)
        self.types, self.groups = types, {None: self}
        self.fields: dict[str, dataclasses.Field] = {}
        self.kinds: dict[str, list[Any]] = {}  # of values
        self.optional: set[str] = set()  # may be None
        self.arguments: dict[str, argparse.Action] = {}
        self.defaults: dict[str, Any] = {}
        help_of = {name: text for one in types for name, text in getattr(one, "inherited_help", {}).items()}
        for kind in types:
            for field in dataclasses.fields(kind):
                if field.init and field.name not in self.fields:
                    text = help_of.get(field.name, field.metadata.get("help", "").replace("%%", "%"))
                    hint = hints_of(kind)[field.name]
                    self.optional |= {field.name} if field.default is None or type(None) in get_args(hint) else set()
                    self._add_field(field, kinds_of(hint), text)
        places = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *places, "[--FLAG VALUE ...]"])

    def _add_field(self, field: dataclasses.Field, kinds: list[Any], text: str) -> None:
        name, metadata, options = field.name, field.metadata, {"help": text.replace("%", "%%")}
        lists = [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]
        kind = lists[0] if lists else str if len(kinds) > 1 else kinds[0]
        enums = [kind for kind in kinds if isclass(kind) and issubclass(kind, Enum)]
        choices = [member.value for enum in enums for member in enum] or metadata.get("choices")
        convert, shown = _KINDS.get(get_origin(kind) or kind, (None, "TEXT"))
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            shown = metadata.get("metavar", None if choices else shown)
            options |= {"type": convert, "choices": choices, "metavar": shown}
            options |= {"action": "extend", "nargs": "+"} if lists else {}
        names = [flag(name), *filter(None, [ALIASES.get(name)])]
        if metadata.get("positional"):
            names, shown = [name], metadata.get("metavar", name.upper())
            options |= {"action": "store", "nargs": "*" if lists else "?", "metavar": shown, "default": None}
        if (title := metadata.get("group")) not in self.groups:
            self.groups[title] = self.add_argument_group(title)
        self.fields[name], self.kinds[name] = field, kinds
        self.arguments[name] = self.groups[title].add_argument(*names, **options)
        if field.default is not dataclasses.MISSING:
            self.defaults[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            self.defaults[name] = field.default_factory()

    def error(self, message: str) -> NoReturn:
        is_first = os.environ.get("RANK", "0") == "0"  # of several processes: it says it
        self.exit(2, f"{self.prog}: error: {message.removeprefix('argument ')}\n" if is_first else None)

    def read(
        self,
        argv: Sequence[str] | None = None,
        *,
        config: Callable[[str | None, Keys], Keys] | None = None,
        defaults: Callable[[dict[str, Any]], Keys] = lambda given: {},
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the values from flags, else the YAML file, else `defaults`, and the names of the first two's fields.

        Args:
            argv: the words of the command line. Default: this process's.
            config: returns the keys of the YAML file, from the text after `--config`, which may be `None`, and the
                values of the flags. `None`: the command has no `--config`.
            defaults: returns field -> value from the values that flags and YAML file set.
        """
        if config is not None:
            self.add_argument("--config", metavar="FILE", help="YAML file with these options; flags override it")
        self.add_argument("-h", "--help", "--help-all", action="store_true", help="print this help")
        flags, unknown = self.split(sys.argv[1:] if argv is None else argv)
        asks_help = flags.pop("help", False)
        if unknown and not asks_help:
            raise G2POError(unknown_flag(unknown[0], self._option_string_actions), unknown[0])
        file = flags.pop("config", None)
        keys, file = config(file, flags) if config else {}, file or "the configuration"
        if word := next((name for name in keys if name not in self.fields), None):
            known = nearest(word, self.fields, "--help lists the flags")
            raise G2POError(f"{word} is not a key of {file}: {known}", "config", word)
        for name, value in keys.items():
            remedy = f"write a value in {file}, or remove the line"
            require(value is not None or name in self.optional, name, None, remedy)
        given = {**{name: self._of_file(name, value) for name, value in keys.items()}, **flags}
        if asks_help:
            print(self.help_with(given), end="")
            raise SystemExit(0)
        return {**defaults(given), **given}, set(given)

    def split(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the flags in `argv` by field, and all words that belong to no flag."""
        parsed, unknown = self.parse_known_args(list(self._spelled(argv)))
        values = {name: value for name, value in vars(parsed).items() if value is not None and value != []}
        for name in (name for name, value in values.items() if isinstance(value, list) and len(value) == 1):
            values[name] = values[name][0] if str in self.kinds[name] else values[name]  # a text, or several
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
            value = value.lower() or "true"
            require(value in _BOOLEANS, name, value, "write true or false")
            yield name if _BOOLEANS[value] else f"--no-{name.removeprefix('--')}"

    def _of_file(self, name: str, value: Any) -> Any:
        """Return a value of a YAML file as the flag would have it, "false" as false; texts and unions as they are."""
        action, kinds = self.arguments[name], self.kinds[name]
        if value is False and "no" in (action.choices or ()):  # which YAML reads as false
            return "no"
        is_list = get_origin(kinds[0]) is list
        is_text = not (action.type or action.choices or isinstance(action, argparse.BooleanOptionalAction))
        if value in (None, []) or len(kinds) > 1 or is_text:
            return [value] if is_list and isinstance(value, str) else value
        parts = value if is_list and isinstance(value, list) else [value]
        texts = [to_json(part) if isinstance(part, Mapping) else str(part) for part in parts]
        return self.split([f"{flag(name)}={text}" for text in texts])[0][name]

    def build(self, values: Keys) -> Iterator[Any]:
        """Yield an object of each dataclass."""
        for name in sorted(self.fields.keys() - values.keys() - self.defaults.keys()):
            action = self.arguments[name]
            raise G2POError(f"{(action.option_strings or [action.metavar])[0]} is missing: {action.help}", name)
        for one in self.types:
            names = [field.name for field in dataclasses.fields(one) if field.init]
            yield one(**{name: values[name] for name in names if name in values})

    def help_with(self, values: Keys) -> str:
        """Return the help, with the values as defaults."""
        for name, value in {**self.defaults, **values}.items():
            if name in self.arguments and value not in (None, "", [], {}, False):
                self.arguments[name].help += f" (default: {getattr(value, 'value', value)})".replace("%", "%%")
        return self.format_help()


def read_config(path: str | Path, field: str = "config") -> dict[str, Any]:
    """Return the keys of a YAML file. Errors name the `field`."""
    import yaml

    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {name.replace("-", "_"): value for name, value in keys.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        remedy = f"write lines like max_steps: 100; it cannot be read ({' '.join(str(error).split())})"
        raise G2POError(f"{field} is {str(path)!r}: {remedy}", field, path) from error


def flag(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question for the known word that is nearest, or `otherwise`."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]}?" if near else otherwise


def unknown_flag(word: str, known: Iterable[str]) -> str:
    """Return the message about a word of a command line that belongs to no flag."""
    if not word.startswith("-"):
        return f"{word!r} does not belong to a flag: --help lists the flags"
    name = word.partition("=")[0]
    return f"{name} is not a flag: {nearest(name, known, '--help lists the flags')}"


def misspelled(words: Sequence[str], fields: Iterable[str] = ()) -> str | None:
    """Return the message about the first word that is no flag of any recipe; `None` if there is none.

    Flags are read from sources, since a misspelled one is answered before torch and TRL are imported. One of another
    recipe is left to the recipe's own parser. `fields`: those of the command, for suggestions.
    """
    known = {"--config", "--help", "--help-all", *map(flag, fields), *ALIASES.values()}
    for package, files in _SOURCES.items():
        for folder in find_spec(package).submodule_search_locations:
            for file in Path(folder).glob(files):
                known.update(map(flag, _OPTION.findall(file.read_text("utf-8"))))
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and not {name, name.replace("--no-", "--", 1)} & known:
            return unknown_flag(word, sorted(known))
    return None
