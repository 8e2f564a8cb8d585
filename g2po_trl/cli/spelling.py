"""Flags of recipes, read from sources, since a misspelled one is answered before torch and TRL are imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .parser import ALIASES, flag, unknown_name

_FIELD = re.compile(r"^    ([a-z]\w*): ", re.MULTILINE)
_OPTION = re.compile(r"^    ([a-z]\w*): [^\n]*= _?[a-z]\w*\(", re.MULTILINE)
_SOURCES = {  # package -> files with options of recipes, and what the line of one is like
    "g2po_trl": ("**/*.py", _OPTION),
    "g2po_envs": ("**/*.py", _OPTION),
    "g2po_recipes": ("*.py", _OPTION),
    "trl": ("trainer/*_config.py", _FIELD),
    "transformers": ("training_args.py", _FIELD),
}


def misspelled(words: Sequence[str], flags: Sequence[str] = ()) -> str | None:
    """Return the message about the first word that is no flag of any recipe; `None` if there is none.

    A flag of another recipe is left to the recipe's own parser. `flags`: those of the command, for suggestions.
    """
    known = {"--config", "--help", "--help-all", *flags, *ALIASES.values()}
    for package, (files, line) in _SOURCES.items():
        for folder in find_spec(package).submodule_search_locations:
            texts = (file.read_text("utf-8") for file in Path(folder).glob(files))
            known.update(flag(name) for text in texts for name in line.findall(text))
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and not {name, name.replace("--no-", "--", 1)} & known:
            return unknown_name(word, sorted(known), "a flag")
    return None
