"""The parser of `g2po evaluate`, `check` and `play`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from ..cli.parser import read_config  # noqa: F401


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that accepts `--max_turns` for `--max-turns`, as `g2po train` spells its options.

    Args:
        short_help: text printed by `--help`; argparse's own help is then printed by `--help-all`.
    """

    def __init__(self, short_help: str | None = None, **options: Any):
        shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)
        super().__init__(**{"formatter_class": shape, "add_help": short_help is None, **options})
        if short_help is not None:
            self.add_argument("-h", "--help", action=_Print, text=short_help, help="print a short help and exit")
            self.add_argument("--help-all", action=_Print, help="print this help and exit")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenated(word) for word in words], namespace)


class _Print(argparse.Action):
    def __init__(self, option_strings, dest, text: str | None = None, help: str | None = None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.text = text

    def __call__(self, parser, namespace, values, option_string=None):
        print(self.text if self.text is not None else parser.format_help(), end="")
        parser.exit()


def _hyphenated(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if re.fullmatch(r"--[A-Za-z][\w-]*", name) else word


def take_options(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of some options by name, each option's last one, and all other words."""
    values, rest, words = {}, [], list(words)
    while words:
        option, equals, value = (word := words.pop(0)).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in names:
            rest.append(word)
        elif not equals and (not words or words[0].startswith("--")):
            raise ValueError(f"{option} has no value: write {option} VALUE")
        else:
            values[name] = value if equals else words.pop(0)
    return values, rest


def json_object(text: str) -> dict[str, Any]:
    """Return an argument that is a JSON object. Raises `ArgumentTypeError` for any other text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object: write {{"name": value}}')
    return value
