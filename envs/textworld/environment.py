"""A TextWorld game as a `TextEnvironment`, played by TextWorld itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from g2po_trl import Observation, StepResult, TextEnvironment

from .games import CACHE, make_game, quiet

NOT_POSSIBLE = "That is not possible here."
_STATUS = re.compile(r"^>.*$", re.MULTILINE)  # the prompt of the interpreter, and its line of room and score


class TextWorldEnvironment(TextEnvironment):
    """Plays games of `make_game`; a solved game returns reward 10.

    The state key is the output of `look` and `inventory`. Only admissible commands reach the interpreter, since other
    texts may make it hang; they change nothing.

    Args:
        hidden_actions: first words of commands that are not listed, but can be played.
        cache_dir: folder of the games.
    """

    def __init__(self, hidden_actions: Sequence[str] = ("look", "inventory"), cache_dir: str = CACHE):
        self.hidden_actions, self.cache_dir = tuple(hidden_actions), cache_dir
        self.game = None

    def reset(self, kind: str = "coin-5", seed: int = 0, **columns: object) -> Observation:
        """Start a game and return its first observation; see `make_game`."""
        import textworld

        self.close()
        names = ("admissible_commands", "description", "inventory", "objective", "won", "lost")
        path = make_game(kind, seed, self.cache_dir)
        with quiet():
            self.game = textworld.start(
                str(path), textworld.EnvInfos(**dict.fromkeys(names, True), extras=["walkthrough"])
            )
        self.state, self.turn = self.game.reset(), 0
        self.walkthrough = list(self.state["extra.walkthrough"] or ())
        self.task = _one_line(self.state.objective)
        return self._observe(self.state.description)

    def step(self, action: str) -> StepResult:
        if self.game is None:
            raise RuntimeError("call reset before step")
        if action not in self.state.admissible_commands:
            return StepResult(self._observe(NOT_POSSIBLE))
        self.state, _, _ = self.game.step(action)
        self.turn += 1
        won, lost = bool(self.state.won), bool(self.state.lost)
        return StepResult(self._observe(self.state.feedback), reward=10.0 if won else 0.0, terminated=won or lost)

    def close(self) -> None:
        if self.game is not None:
            self.game.close()
        self.game = None

    def _observe(self, text: str) -> Observation:
        actions = [a for a in self.state.admissible_commands or () if a.split()[0] not in self.hidden_actions]
        key = _one_line(f"{self.state.description} {self.state.inventory}")
        return Observation(_one_line(text), key, actions, self.task)


def expert(environment: TextWorldEnvironment) -> str | None:
    """Return the next command of the game's walkthrough, which is followed from the start; `None` after its end."""
    return next(iter(environment.walkthrough[environment.turn :]), None)


def _one_line(text: str) -> str:
    return " ".join(_STATUS.sub("", text or "").split())
