"""An expert's action in a state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from g2po_trl.utils.json import write_json_lines


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


def save(path: Path, demonstrations: Iterable[Demonstration]) -> None:
    """Write one demonstration per line, as JSON."""
    write_json_lines(path, map(asdict, demonstrations))


def load(path: Path) -> list[Demonstration]:
    """Return the demonstrations that `save` wrote."""
    with path.open(encoding="utf-8") as file:
        return [Demonstration(**json.loads(line)) for line in file]
