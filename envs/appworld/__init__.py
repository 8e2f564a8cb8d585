"""AppWorld: tasks solved by writing code that calls everyday apps; each world runs in its own process."""

from .environment import AppworldEnvironment
from .prompts import APPWORLD_PROMPT
from .server import AppworldServer, Installation

__all__ = ["APPWORLD_PROMPT", "AppworldEnvironment", "AppworldServer", "Installation"]
