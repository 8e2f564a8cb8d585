"""An expert's action in a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demonstration:
    """One prompt's contents and the expert's action.

    `actions`: the listed actions; `others`: further possible actions, if the list is incomplete.
    """

    task: str
    observation: str
    actions: Sequence[str]
    history: Sequence[tuple[str, str]]
    steps_taken: int
    expert: str
    others: Sequence[str] = ()
