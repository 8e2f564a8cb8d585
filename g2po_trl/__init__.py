"""G2PO for language-model agents, on top of TRL. `from g2po_trl import …` gives the whole public API.

Names are looked up on first use, so that the graph and the advantages load without torch and TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import G2POConfig
    from .credit.advantages import edge_advantage, episode_advantage, g2po, gigpo, grpo, node_advantage, rloo
    from .credit.graph import StateGraph, TrajectoryRecord
    from .credit.rivals import crbc, graphgpo, hgpo
    from .credit.state_keys import NormalisedKey
    from .environments.checks import check_environment
    from .environments.contract import Observation, StepResult, TextEnvironment
    from .environments.gymnasium_games import GymnasiumEnvironment
    from .environments.pool import EnvironmentPool
    from .environments.tasks import tasks_dataset
    from .environments.textarena_games import TextArenaEnvironment
    from .environments.tools import ToolEnvironment
    from .ppo import PPOConfig, PPOTrainer
    from .rollout.actor import PromptActor
    from .rollout.generation import TransformersEngine
    from .rollout.player import Player
    from .rollout.prompting import PromptTemplate
    from .rollout.sampling import Sampling
    from .runs.hub import HubError
    from .trainer import G2POTrainer
    from .trajectory import Step, Trajectory, read_jsonl, write_jsonl

_MODULE_OF = {
    "Step": "trajectory",
    "Trajectory": "trajectory",
    "read_jsonl": "trajectory",
    "write_jsonl": "trajectory",
    "StateGraph": "credit.graph",
    "TrajectoryRecord": "credit.graph",
    "episode_advantage": "credit.advantages",
    "node_advantage": "credit.advantages",
    "edge_advantage": "credit.advantages",
    "g2po": "credit.advantages",
    "gigpo": "credit.advantages",
    "grpo": "credit.advantages",
    "rloo": "credit.advantages",
    "graphgpo": "credit.rivals",
    "hgpo": "credit.rivals",
    "crbc": "credit.rivals",
    "TextEnvironment": "environments.contract",
    "Observation": "environments.contract",
    "StepResult": "environments.contract",
    "ToolEnvironment": "environments.tools",
    "GymnasiumEnvironment": "environments.gymnasium_games",
    "TextArenaEnvironment": "environments.textarena_games",
    "check_environment": "environments.checks",
    "EnvironmentPool": "environments.pool",
    "tasks_dataset": "environments.tasks",
    "Player": "rollout.player",
    "PromptActor": "rollout.actor",
    "Sampling": "rollout.sampling",
    "TransformersEngine": "rollout.generation",
    "PromptTemplate": "rollout.prompting",
    "HubError": "runs.hub",
    "NormalisedKey": "credit.state_keys",
    "G2POConfig": "config",
    "G2POTrainer": "trainer",
    "PPOConfig": "ppo",
    "PPOTrainer": "ppo",
}

__all__ = [
    "EnvironmentPool",
    "G2POConfig",
    "G2POTrainer",
    "GymnasiumEnvironment",
    "HubError",
    "NormalisedKey",
    "Observation",
    "PPOConfig",
    "PPOTrainer",
    "Player",
    "PromptActor",
    "PromptTemplate",
    "Sampling",
    "StateGraph",
    "Step",
    "StepResult",
    "TextArenaEnvironment",
    "TextEnvironment",
    "ToolEnvironment",
    "Trajectory",
    "TrajectoryRecord",
    "TransformersEngine",
    "check_environment",
    "crbc",
    "edge_advantage",
    "episode_advantage",
    "g2po",
    "gigpo",
    "graphgpo",
    "grpo",
    "hgpo",
    "node_advantage",
    "read_jsonl",
    "rloo",
    "tasks_dataset",
    "write_jsonl",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
