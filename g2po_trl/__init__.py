"""G2PO for language-model agents, on top of TRL. `from g2po_trl import …` gives the whole public API.

Names are looked up on first use, so that the graph and the advantages load without torch and TRL.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .credit.estimators.registry import ESTIMATORS

if TYPE_CHECKING:
    from .config import G2POConfig
    from .credit.estimators.common import episode_advantage
    from .credit.estimators.g2po import edge_advantage, g2po, node_advantage
    from .credit.graph import StateGraph, TrajectoryRecord
    from .credit.state_keys import NormalisedKey
    from .engines.sampling import Sampling
    from .engines.transformers import TransformersEngine
    from .environments.adapters.agent import AgentEnvironment
    from .environments.adapters.agent_command import AgentCommand
    from .environments.adapters.gymnasium import GymnasiumEnvironment
    from .environments.adapters.textarena import TextArenaEnvironment
    from .environments.adapters.trl_tools import ToolEnvironment
    from .environments.contract import Observation, StepResult, TextEnvironment
    from .environments.pool.limits import PoolLimits
    from .environments.pool.pool import EnvironmentPool
    from .environments.tasks import tasks_dataset
    from .evaluation.contract import check_environment
    from .ppo.trainer import PPOConfig, PPOTrainer
    from .prompts.template import PromptTemplate
    from .rollout.actor import PromptActor
    from .rollout.player import Player
    from .runs.hub import HubError
    from .trainer import G2POTrainer
    from .trajectory import Step, Trajectory, read_jsonl, write_jsonl
    from .utils.errors import G2POError

_MODULE_OF = {
    **dict.fromkeys(ESTIMATORS, "credit"),
    "StateGraph": "credit",
    "TrajectoryRecord": "credit",
    "NormalisedKey": "credit",
    "episode_advantage": "credit",
    "node_advantage": "credit",
    "edge_advantage": "credit",
    "Step": "trajectory",
    "Trajectory": "trajectory",
    "read_jsonl": "trajectory",
    "write_jsonl": "trajectory",
    "TextEnvironment": "environments.contract",
    "Observation": "environments.contract",
    "StepResult": "environments.contract",
    "ToolEnvironment": "environments.adapters.trl_tools",
    "AgentEnvironment": "environments.adapters.agent",
    "AgentCommand": "environments.adapters.agent_command",
    "GymnasiumEnvironment": "environments.adapters.gymnasium",
    "TextArenaEnvironment": "environments.adapters.textarena",
    "check_environment": "evaluation.contract",
    "EnvironmentPool": "environments.pool.pool",
    "PoolLimits": "environments.pool.limits",
    "tasks_dataset": "environments.tasks",
    "Player": "rollout.player",
    "PromptActor": "rollout.actor",
    "Sampling": "engines.sampling",
    "TransformersEngine": "engines.transformers",
    "PromptTemplate": "prompts.template",
    "HubError": "runs.hub",
    "G2POError": "utils.errors",
    "G2POConfig": "config",
    "G2POTrainer": "trainer",
    "PPOConfig": "ppo.trainer",
    "PPOTrainer": "ppo.trainer",
}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
