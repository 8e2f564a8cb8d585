"""Sokoban: push boxes onto goals; levels are numbered, and the distance to a solution is known exactly."""

from .environment import SokobanEnvironment, distance_of, expert, limited_expert
from .games import SIZES, Level, Size, level_rows, make_level
from .prompts import SOKOBAN_COMPACT_PROMPT, SOKOBAN_PROMPT
from .solver import distances

__all__ = [
    "SOKOBAN_COMPACT_PROMPT",
    "SOKOBAN_PROMPT",
    "SIZES",
    "Level",
    "Size",
    "SokobanEnvironment",
    "distance_of",
    "distances",
    "expert",
    "level_rows",
    "limited_expert",
    "make_level",
]
