"""Renaming: the same demonstration with other names of things.

A tiny model that always finds the mug in cabinet 1 learns "cabinet 1" instead of the place in the prompt. If every
type and number is exchanged at random, it has to read the prompt. Things with a role keep their names: the sink
cleans, the microwave heats, the fridge cools, the lamps shine. Things that open are exchanged among each other.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from g2po_envs.alfworld.vocabulary import OBJECT_TYPES, OPENABLE, RECEPTACLE_TYPES
from g2po_envs.tiny.demonstration import Demonstration

ROLES = frozenset({"sinkbasin", "microwave", "fridge", "desklamp", "floorlamp"})
TYPE_NAMES = tuple(sorted(name.lower() for name in (*OBJECT_TYPES, *RECEPTACLE_TYPES)))
MAX_NUMBER = 9

_CLASSES = tuple(
    sorted({name.lower() for name in names} - ROLES)
    for names in (OBJECT_TYPES, OPENABLE & set(RECEPTACLE_TYPES), set(RECEPTACLE_TYPES) - OPENABLE)
)
_NAME = re.compile(rf"\b({'|'.join(sorted(TYPE_NAMES, key=len, reverse=True))})(?: (\d+))?\b")


class Renaming:
    """A consistent exchange of type names and numbers, drawn at random from `rng`."""

    def __init__(self, rng: random.Random):
        self.types: dict[str, str] = {}
        for names in _CLASSES:
            self.types.update(zip(names, rng.sample(names, len(names)), strict=True))
        self._rng = rng
        self._numbers: dict[str, list[int]] = {}

    def _number(self, kind: str, number: int) -> int:
        if number > MAX_NUMBER:
            return number
        if kind not in self._numbers:
            self._numbers[kind] = self._rng.sample(range(1, MAX_NUMBER + 1), MAX_NUMBER)
        return self._numbers[kind][number - 1]

    def __call__(self, text: str) -> str:
        def rename(match: re.Match) -> str:
            kind, number = match.groups()
            new = self.types.get(kind, kind)
            return new if number is None else f"{new} {self._number(kind, int(number))}"

        return _NAME.sub(rename, text)


def augment(demonstration: Demonstration, rng: random.Random, keep_names: float = 0.3) -> Demonstration:
    """Exchange names (except in a share `keep_names` of cases) and shuffle the admissible actions."""
    rename = (lambda text: text) if rng.random() < keep_names else Renaming(rng)
    actions = [rename(action) for action in demonstration.actions]
    rng.shuffle(actions)
    return replace(
        demonstration,
        task=rename(demonstration.task),
        observation=rename(demonstration.observation),
        actions=actions,
        history=[(rename(observation), rename(action)) for observation, action in demonstration.history],
        expert=rename(demonstration.expert),
    )
