"""ALFWorld: household tasks in text, on the real TextWorld engine (`pip install -e ".[alfworld]"`)."""

from g2po_envs.alfworld.engine import CorruptGameError
from g2po_envs.alfworld.environment import AlfworldEnvironment
from g2po_envs.alfworld.manifest import TASK_TYPES, Manifest
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT, ALFWORLD_PROMPT

__all__ = [
    "ALFWORLD_COMPACT_PROMPT",
    "ALFWORLD_PROMPT",
    "OBJECT_TYPES",
    "RECEPTACLE_TYPES",
    "TASK_TYPES",
    "AlfworldEnvironment",
    "CorruptGameError",
    "Manifest",
    "generate_games",
]


def __getattr__(name: str):
    # Lazily: these need the alfworld package, and `python -m g2po_envs.alfworld.games` must not find itself imported.
    if name == "generate_games":
        from g2po_envs.alfworld.games import generate_games

        return generate_games
    if name in ("OBJECT_TYPES", "RECEPTACLE_TYPES"):
        from g2po_envs.alfworld import vocabulary

        return getattr(vocabulary, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
