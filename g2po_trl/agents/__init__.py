"""Agents: prompted chat models as agents in any environment, without training."""

from .ask import Agent, DirectAgent, ReActAgent, ReflexionAgent
from .chat import ChatModel, ChatReply, ChatSettings, TokenBudget, TokenBudgetSpentError
from .play import PanelPlayer

__all__ = [
    "Agent",
    "ChatModel",
    "ChatReply",
    "ChatSettings",
    "DirectAgent",
    "ReActAgent",
    "ReflexionAgent",
    "TokenBudget",
    "TokenBudgetSpentError",
    "PanelPlayer",
]
