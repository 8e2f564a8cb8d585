"""Agents: prompted chat models as agents in any environment, without training."""

from .agents import Agent, DirectAgent, ReActAgent, ReflexionAgent
from .chat_models import ChatModel, ChatReply, ChatSettings, TokenBudget, TokenBudgetSpentError
from .panel_runner import PanelPlayer

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
