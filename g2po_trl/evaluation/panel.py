"""Panels: fixed sets of tasks for evaluations, and how they are played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..environments.contract import TextEnvironment
from ..prompts.template import PromptTemplate
from ..utils.options import is_of_kind, require


@dataclass(frozen=True)
class Panel:
    """A fixed set of tasks for evaluations, and how they are played.

    Args:
        name: name in tables.
        rows: the tasks: keyword arguments of `reset`.
        environment_factory: makes the environment.
        prompt_template: for trained agents, as set by the environment's recipe. `None`: the environment's.
        max_turns, history_length, history: as set by the environment's recipe.
        about: for prompted agents: a description of the environment and the possible actions.
        action_form: for prompted agents: how an action is written.
        multiline: for prompted agents: an action may have several lines (code). `False`: it ends with its line.
        lower_case: for prompted agents: play actions in lower case. `False`: as listed, ignoring case, or as written.
        columns: heading of each table column -> name in `summarize`, e.g. `"success_rate_by_type/<type>"`.
        data: identifies the data behind the tasks, e.g. a hash of their files.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    environment_factory: Callable[[], TextEnvironment]
    prompt_template: PromptTemplate | None = None
    max_turns: int = 30
    history_length: int = 2
    history: str = "window"
    about: str = "You act in an environment that answers in text."
    action_form: str = "the action, exactly as listed"
    multiline: bool = False
    lower_case: bool = False
    columns: Mapping[str, str] = field(default_factory=lambda: {"Succ.": "success_rate"})
    data: str = ""


def check_selection(number: int | None, skip: int = 0) -> None:
    """Refuse a `number` of tasks below 1, or a `skip` below 0, which would select other tasks."""
    require(number is None or (is_of_kind(number, int) and number > 0), "number", number, "set it to at least 1")
    require(is_of_kind(skip, int) and skip >= 0, "skip", skip, "set it to at least 0")
