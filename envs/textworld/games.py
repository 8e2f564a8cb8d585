"""Games by kind and seed, made by TextWorld's own generator and kept in a folder."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from g2po_trl.utils.options import require

CACHE = "~/.cache/g2po_trl"
HELD_OUT = 1_000_000  # seeds of evaluation begin here

# Name -> TextWorld's challenge and its settings. Level 100 n + q: (n + 1) q rooms, the q-th command takes the coin.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "coin-3": ("tw-coin_collector", {"level": 103}),
    "coin-5": ("tw-coin_collector", {"level": 105}),
    "coin-10": ("tw-coin_collector", {"level": 210}),
    "simple": ("tw-simple", {"rewards": "sparse", "goal": "brief", "test": False}),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the interpreter's warning that it does not know the game; TextWorld needs nothing that is disabled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")
        yield


def make_game(kind: str, seed: int, cache_dir: str = CACHE) -> Path:
    """Return the file of a game, which is made if it is not there (some seconds).

    Raises:
        G2POError: if there is no such kind.
    """
    require(kind in KINDS, "kind", kind, f"choose one of {', '.join(KINDS)}")
    folder = Path(cache_dir).expanduser() / f"textworld-{kind}"
    if (path := folder / f"{seed}.z8").is_file():
        return path
    from textworld.challenges import CHALLENGES
    from textworld.generator import GameOptions, compile_game

    challenge, settings = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    options = GameOptions()
    options.seeds = seed
    options.grammar.only_last_action = True  # the task names the goal, not the way
    with tempfile.TemporaryDirectory(dir=folder) as scratch, quiet():
        options.path = str(Path(scratch, path.name))
        compile_game(CHALLENGES[challenge][1](settings, options), options)
        Path(scratch, path.name).with_suffix(".json").replace(path.with_suffix(".json"))
        Path(scratch, path.name).replace(path)  # last: a game whose file is there is whole
    return path


def game_rows(kind: str, number: int, held_out: bool = False, first: int = 0) -> list[dict[str, Any]]:
    """Return tasks, their columns the arguments of `TextWorldEnvironment.reset`.

    Args:
        kind: see `KINDS`.
        number: how many.
        held_out: games of other seeds, for evaluation.
        first: the seed to begin with.
    """
    start = first + HELD_OUT * held_out
    return [{"task_id": f"{kind}-{seed}", "kind": kind, "seed": seed} for seed in range(start, start + number)]
