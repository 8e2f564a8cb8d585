"""What the adapters of other libraries' environments share: imports, chance, and facts of an episode."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...utils.extras import install_command
from ...utils.json import to_plain
from ..validation import is_score


def import_extra(module: str, extra: str) -> ModuleType:
    """A library that comes with one of the package's extras.

    Raises:
        ImportError: naming the extra, when the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and lacks something of its own
        raise ImportError(f"{module} is not installed: {install_command(extra)}") from error


class OwnRandomness:
    """A private course of Python's and numpy's global generators.

    Games draw from `random` and `numpy.random` themselves; a worker plays several episodes in turn, and each must go
    on as if it were alone. Inside `playing` the global generators are this object's, outside they are as they were.
    """

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def playing(self, seed: int | None = None) -> Iterator[None]:
        """Go on where the last `playing` ended, or begin again with `seed`."""
        outside = random.getstate(), np.random.get_state()
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        elif self._state is not None:
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def facts_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, texts and truth values of a library's info. What is larger is left out, and so are scores that are
    no numbers: evaluations report their means."""
    facts = {}
    for name, value in info.items():
        if not isinstance(value, (str, int, float)) and not hasattr(value, "tolist"):
            continue
        name, value = str(name), to_plain(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or (isinstance(value, (str, bool)) and not is_score(name)):
            facts[name] = value
    return facts


class History:
    """Names the state of a game whose observations do not tell it: by all that was done and seen in its episode."""

    def __init__(self, first: str):
        self._digest = hashlib.blake2b(first.encode("utf-8", "replace"), digest_size=8)
        self._steps = 0

    def add(self, action: str, seen: str) -> None:
        self._steps += 1
        self._digest.update(f"\0{action}\0{seen}".encode("utf-8", "replace"))

    @property
    def key(self) -> str:
        return f"{self._steps} steps {self._digest.hexdigest()}"
