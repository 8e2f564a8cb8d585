"""Sokoban: push boxes onto goals; levels are numbered, and the distance to a solution is known exactly."""

from .environment import SokobanEnvironment, distance_of, expert
from .levels import SIZES, Level, Size, level_rows, make_level
from .solver import distances

__all__ = [
    "SIZES",
    "Level",
    "Size",
    "SokobanEnvironment",
    "distance_of",
    "distances",
    "expert",
    "level_rows",
    "make_level",
]
