"""The flags of a recipe, read from the source of its dataclasses.

TRL's parser needs the classes themselves, whose import takes seconds. This parser has the same flags and reports a
typo at once: it reads the source of the same classes, of the recipe, g2po_trl, TRL and transformers.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ..utils.parser import describe_unknown


@dataclass(frozen=True)
class Field:
    """A dataclass's field. `default`: `...` if it is computed. `options`: arguments of argparse in its metadata."""

    name: str
    annotation: str
    default: Any
    aliases: tuple[str, ...]
    options: Mapping[str, Any]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module_path(name: str) -> Path | None:
    """Return the file of a module without importing it."""
    top, *rest = name.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin)
    path = Path(next(iter(spec.submodule_search_locations or [""]))).joinpath(*rest)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported_from(node: ast.ImportFrom, path: Path) -> Path | None:
    if not node.level:
        beside = path.with_name(f"{node.module}.py")  # recipes import each other by bare names
        return beside if beside.is_file() else _module_path(node.module)
    folder = path.parents[node.level - 1]
    target = folder.joinpath(*node.module.split(".")) if node.module else folder
    return next((file for file in (target.with_suffix(".py"), target / "__init__.py") if file.is_file()), None)


def find_class(path: Path, name: str) -> tuple[Path, ast.ClassDef]:
    """Return the file that defines the class called `name` in `path`, and the class, or raise `LookupError`."""
    tree = _tree(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return path, node
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (file := _imported_from(node, path)):
                    return find_class(file, alias.name)
    raise LookupError(f"{path} has no class {name}")


def fields_of(path: Path, name: str) -> dict[str, Field]:
    """Return the fields of a dataclass by name, inherited ones first."""
    path, found = find_class(path, name)
    fields: dict[str, Field] = {}
    for base in reversed(found.bases):
        if isinstance(base, ast.Name) and base.id != "object":
            fields |= fields_of(path, base.id)
    for node in found.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation, options = ast.unparse(node.annotation), _options(node.value)
        if "ClassVar" in annotation or options.get("init") is False:
            continue
        metadata = options.get("metadata", {})
        aliases = metadata.get("aliases", ())
        fields[node.target.id] = Field(
            node.target.id,
            annotation,
            options.get("default", ...),
            (aliases,) if isinstance(aliases, str) else tuple(aliases),
            {
                name: metadata[name]
                for name in ("choices", "nargs", "const")
                if metadata.get(name, ...) is not ...  # a computed one is left to TRL's parser
            },
        )
    return fields


def _options(value: ast.expr | None) -> dict[str, Any]:
    """Return the literal arguments of `field(…)`, with the literals in its metadata."""
    if not isinstance(value, ast.Call):
        return {"default": _literal(value)}
    options = {word.arg: _literal(word.value) for word in value.keywords if word.arg}
    for word in value.keywords:
        if word.arg == "metadata" and isinstance(word.value, ast.Dict):
            pairs = zip(word.value.keys, word.value.values)
            options["metadata"] = {_literal(key): _literal(part) for key, part in pairs}
    return options


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def as_bool(text: str) -> bool:
    """Return the truth value of a flag's text, with transformers' spellings."""
    word = text.lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


class FlagsError(ValueError):
    """A flag or a key is unknown, or its value is invalid."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagsError(re.sub(r"^argument (--\w+)\S*: ", r"\1: ", message))


def make_parser(fields: Sequence[Field]) -> argparse.ArgumentParser:
    """Return a parser with the flags of TRL's parser, whose namespace contains only the given ones."""
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for one in fields:
        names = [f"--{one.name}", *([f"--{one.name.replace('_', '-')}"] if "_" in one.name else []), *one.aliases]
        kind, options = _kind(one.annotation), dict(one.options)
        if kind == "list":
            options["nargs"] = "+"
        elif kind is as_bool:
            options["type"] = as_bool
            if "None" not in one.annotation or one.default is not None:
                options |= {"nargs": "?", "const": True}
        elif kind is not None:
            options["type"] = kind
        parser.add_argument(*names, dest=one.name, **options)
        if kind is as_bool and one.default is True:
            names = [f"--no_{one.name}", f"--no-{one.name.replace('_', '-')}"]
            parser.add_argument(*names, action="store_false", dest=one.name)
    return parser


def _kind(annotation: str) -> Callable[[str], Any] | str | None:
    """Return what converts a flag's text, "list" for lists, or `None` for types that stay text."""
    text = annotation.removeprefix("Optional[").removesuffix("]") if annotation.startswith("Optional[") else annotation
    kinds = {part.strip() for part in text.split("|")} - {"None"}
    if any(kind.startswith(("list", "List")) for kind in kinds):
        return "list"
    return {"int": int, "float": float, "bool": as_bool}.get(kinds.pop()) if len(kinds) == 1 else None


def read_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Return field -> value of the fields on the command line. Raises `FlagsError` if one is invalid."""
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise FlagsError(describe_unknown(parser, unknown[0], "flag", "--help-all"))
    return vars(given)


def read_keys(parser: argparse.ArgumentParser, keys: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration file. Raises `FlagsError` for an unknown key or an invalid value."""
    actions = {action.dest: action for action in reversed(parser._actions)}
    for name, value in keys.items():
        if name not in actions:
            raise FlagsError(describe_unknown(parser, f"--{name}", "key of the config file", "--help-all"))
        try:
            yield name, parser._get_value(actions[name], value) if isinstance(value, str) else value
        except argparse.ArgumentError as error:
            raise FlagsError(f"{name} is {value!r}: {error.message}") from error
