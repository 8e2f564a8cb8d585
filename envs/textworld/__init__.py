"""Small generated TextWorld games: a seed is a task."""

from .environment import TextWorldEnvironment, expert
from .games import KINDS, game_rows, make_game
from .prompts import TEXTWORLD_PROMPT

__all__ = ["KINDS", "TEXTWORLD_PROMPT", "TextWorldEnvironment", "expert", "game_rows", "make_game"]
