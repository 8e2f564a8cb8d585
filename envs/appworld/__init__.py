"""AppWorld: tasks solved by writing code against everyday apps; each world runs in a process of its own."""

from .environment import AppworldEnvironment
from .prompts import APPWORLD_PROMPT
from .server import AppworldServer, Installation

__all__ = ["APPWORLD_PROMPT", "AppworldEnvironment", "AppworldServer", "Installation"]
