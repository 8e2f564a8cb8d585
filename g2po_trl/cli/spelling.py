"""Flags of fields, and what is meant by one that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

ALIASES = {"model_name_or_path": "--model"}
_FIELD = re.compile(r"^    ([a-z]\w*): ", re.MULTILINE)
_OPTION = re.compile(r"^    ([a-z]\w*): [^\n]*= _?[a-z]\w*\(", re.MULTILINE)
_SOURCES = {  # package -> files with options of recipes, and what the line of one is like
    "g2po_trl": ("**/*.py", _OPTION),
    "g2po_envs": ("**/*.py", _OPTION),
    "g2po_recipes": ("*.py", _OPTION),
    "trl": ("trainer/*_config.py", _FIELD),
    "transformers": ("training_args.py", _FIELD),
}


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


def misspelled(words: Sequence[str], flags: Sequence[str] = ()) -> str | None:
    """Return the message about the first word that is no flag of any recipe; `None` if there is none.

    Flags are read from sources, since a misspelled one is answered before torch and TRL are imported. One of another
    recipe is left to the recipe's own parser. `flags`: those of the command, for suggestions.
    """
    known = {"--config", "--help", "--help-all", *flags, *ALIASES.values()}
    for package, (files, line) in _SOURCES.items():
        for folder in find_spec(package).submodule_search_locations:
            texts = (file.read_text("utf-8") for file in Path(folder).glob(files))
            known.update(flag(name) for text in texts for name in line.findall(text))
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and not {name, name.replace("--no-", "--", 1)} & known:
            return unknown_flag(word, sorted(known))
    return None
