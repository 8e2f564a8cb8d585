"""The list of games, sorted by ids that are hashes of the games' content.

The same games have the same ids, the same order and the same `hash` on every machine and under every path, so one
short string identifies a set of tasks in a paper or a log.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from g2po_envs.alfworld.engine import CorruptGameError, read_game
from g2po_trl.utils.options import require

GAME_FILE = "game.tw-pddl"
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
# The official loader leaves these out too: the game files come with tasks that the text engine cannot state.
_LEFT_OUT = ("movable", "Sliced")


def game_id(game: dict) -> str:
    """Return a game's id, a hash of its problem and grammar, which contains the task's wording."""
    content = f"{game['pddl_problem']}\0{game['grammar']}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Manifest:
    """Playable games by id.

    Args:
        games: id -> (task type, path), in the order of the sorted ids.
        skipped: reason for leaving out games -> number of games.
    """

    games: dict[str, tuple[str, str]]
    skipped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def scan(cls, directory: str | Path) -> Manifest:
        """Find every `game.tw-pddl` below `directory`, in the official layout or any other.

        Raises:
            G2POError: if there is no game to play.
            CorruptGameError: if a game file cannot be read; the message names it.
        """
        directory = Path(directory).expanduser()
        require(directory.is_dir(), "directory", str(directory), f"give a folder that holds {GAME_FILE} files")
        games, skipped = {}, Counter()
        for path in sorted(Path(root, GAME_FILE) for root, _, files in os.walk(directory) if GAME_FILE in files):
            game = read_game(str(path))
            if any(word in str(path.relative_to(directory)) for word in _LEFT_OUT):
                skipped["movable receptacle or sliced object"] += 1
            elif game.get("solvable") is False:
                skipped["unsolvable"] += 1
            elif (task_type := _task_type(path)) not in TASK_TYPES:
                skipped["other task type"] += 1
            elif (task_id := game_id(game)) in games:
                skipped["the same game again"] += 1
            else:
                games[task_id] = (task_type, str(path.absolute()))
        remedy = (
            f"it holds no games to play (left out: {dict(skipped)}). `alfworld-download` downloads the official ones, "
            "`python -m g2po_envs.alfworld.games` generates games"
        )
        require(bool(games), "directory", str(directory), remedy)
        return cls(dict(sorted(games.items())), dict(skipped))

    @property
    def hash(self) -> str:
        """Hash of the set of games, independent of their paths."""
        return hashlib.sha256("\n".join(sorted(self.games)).encode()).hexdigest()[:12]

    def rows(self) -> list[dict[str, str]]:
        """Return dataset rows: arguments of `AlfworldEnvironment.reset`, and the task type."""
        return [{"task_id": task_id, "task_type": task_type} for task_id, (task_type, _) in self.games.items()]

    def path(self, task_id: str) -> str:
        is_known = task_id in self.games
        require(is_known, "task_id", task_id, f"manifest {self.hash} ({len(self.games)} games) has no such game")
        return self.games[task_id][1]

    def merged(self, *others: Manifest) -> Manifest:
        """Return a manifest of all games, for an environment that trains and evaluates."""
        games, skipped = dict(self.games), Counter(self.skipped)
        for other in others:
            games.update(other.games)
            skipped.update(other.skipped)
        return Manifest(dict(sorted(games.items())), dict(skipped))

    def without(self, other: Manifest) -> Manifest:
        """Return the games that another manifest lacks."""
        return Manifest({name: game for name, game in self.games.items() if name not in other.games}, self.skipped)

    def summary(self) -> str:
        """Return one line with the number of games by type, skipped games and the hash."""
        types = ", ".join(
            f"{number} {kind}" for kind, number in sorted(Counter(k for k, _ in self.games.values()).items())
        )
        left_out = "".join(f"; left out {number}: {reason}" for reason, number in self.skipped.items())
        return f"{len(self.games)} games ({types}){left_out}; manifest {self.hash}"

    def __len__(self) -> int:
        return len(self.games)


def _task_type(path: Path) -> str:
    """Return the task type from `traj_data.json`, else from the name of a parent folder."""
    try:
        described = json.loads((path.parent / "traj_data.json").read_text())["task_type"]
    except FileNotFoundError:
        described = ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptGameError(f"{path.parent / 'traj_data.json'}: names no task type ({error})") from error
    for name in (described, *(parent.name for parent in path.parents)):
        for task_type in TASK_TYPES:
            if name.startswith(task_type):
                return task_type
    if described:
        return described
    raise CorruptGameError(
        f"{path}: task type unknown. Put a traj_data.json with a task_type next to it, or name a parent folder "
        "like pick_and_place_simple-Mug-None-Desk-1"
    )
