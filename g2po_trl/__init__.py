"""G2PO for language-model agents, on top of TRL. `from g2po_trl import …` provides the whole public API.

A name is imported on first use, so that the graph and the estimators load without torch and TRL.
"""

import os
from importlib import import_module
from typing import Any

from .credit.estimators.registry import ESTIMATORS

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle torch threads must not spin on the environments' cores

_PUBLIC = {  # module -> its public names; those of g2po_envs are adapters of other libraries
    "config": ("G2POConfig",),
    "credit": (
        *("StateGraph", "TrajectoryRecord", "NormalisedKey", "episode_advantage", "node_advantage", "edge_advantage"),
        *ESTIMATORS,
    ),
    "engines.sampling": ("Sampling",),
    "engines.transformers": ("TransformersEngine",),
    "agents.agent": ("AgentEnvironment",),
    "agents.command": ("AgentCommand",),
    "agents.workspace": ("Workspace",),
    "g2po_envs.adapters.gymnasium": ("GymnasiumEnvironment",),
    "g2po_envs.adapters.textarena": ("TextArenaEnvironment",),
    "environments.tools.trl_tools": ("ToolEnvironment",),
    "environments.contract": ("Observation", "StepResult", "TextEnvironment"),
    "check.contract": ("check_environment",),
    "evaluation.agents": ("load_agent",),
    "environments.episode_limits": ("EpisodeLimits",),
    "environments.pool.limits": ("PoolLimits",),
    "environments.pool.pool": ("EnvironmentPool",),
    "environments.tasks": ("tasks_dataset",),
    "ppo.trainer": ("PPOConfig", "PPOTrainer"),
    "prompts.template": ("PromptTemplate",),
    "rollout.actor": ("PromptActor",),
    "rollout.player": ("Player",),
    "runs.hub": ("HubError",),
    "trainer": ("G2POTrainer",),
    "trajectory": ("Step", "Trajectory", "read_jsonl", "write_jsonl"),
    "utils.errors": ("G2POError",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    module = module if module.startswith("g2po_envs.") else f"{__name__}.{module}"
    globals()[name] = value = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return __all__
