"""Helpers shared by the adapters: isolated randomness and info."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from g2po_trl.environments.validation import is_score
from g2po_trl.utils.json import to_plain


class PrivateRandomState:
    """Private state of Python's and numpy's global random generators.

    Games draw from `random` and `numpy.random`, and a worker interleaves several episodes, which must not affect each
    other. Inside `active` the global generators have this object's state; afterwards their previous state is restored.
    """

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def active(self, seed: int | None = None) -> Iterator[None]:
        """Continue from the state at the end of the last `active`, or start from `seed`."""
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


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, strings and booleans of a library's info, without scores that are not numbers."""
    facts = {}
    for name, value in info.items():
        if not isinstance(value, (str, int, float)) and not hasattr(value, "tolist"):
            continue
        name, value = str(name), to_plain(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or (isinstance(value, (str, bool)) and not is_score(name)):
            facts[name] = value
    return facts
