"""What an expert would do, in a state somebody got into."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from g2po_trl.utils.json import write_json_lines


@dataclass(frozen=True)
class Demonstration:
    """One prompt's contents and the expert's action.

    `actions`: what is listed; `others`: what else might have been done, where the list does not say it in full.
    """

    task: str
    observation: str
    actions: Sequence[str]
    history: Sequence[tuple[str, str]]
    steps_taken: int
    expert: str
    others: Sequence[str] = ()


def save(path: Path, demonstrations: Iterable[Demonstration]) -> None:
    """One demonstration a line."""
    write_json_lines(path, map(asdict, demonstrations))


def load(path: Path) -> list[Demonstration]:
    """Read what `save` wrote."""
    with path.open(encoding="utf-8") as file:
        return [Demonstration(**json.loads(line)) for line in file]
