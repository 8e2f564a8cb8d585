"""Evaluation sets (panels): fixed sets of tasks, and their episodes, played on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engines.sampling import derived_seed
from ..environments.contract import TextEnvironment
from ..prompts.template import DEFAULT_PROMPT, PromptTemplate
from ..trajectory import Trajectory
from ..utils.options import is_of_kind, require

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Panel:
    """A fixed set of tasks for evaluations, and how they are played.

    Args:
        name: name in tables.
        rows: the tasks: keyword arguments of `reset`.
        environment_factory: makes the environment.
        prompt_template, max_turns, history_length, history: for trained agents, as set by the environment's recipe.
        about: for prompted agents: a description of the environment and the possible actions.
        action_form: for prompted agents: how an action is written.
        multiline: for prompted agents: an action may have several lines.
        lower_case: for prompted agents: play actions in lower case. `False`: as listed, ignoring case, or as written.
        columns: heading of each table column -> name in `summarize`; success by task type is
            `"success_rate_by_type/<type>"`.
        data: identifies the data behind the tasks, e.g. a hash of their files.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    environment_factory: Callable[[], TextEnvironment]
    prompt_template: PromptTemplate = DEFAULT_PROMPT
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


def play_panel(
    play: Callable[[list[dict[str, Any]], list[int]], list[Trajectory]],
    rollout: Callable[[], AbstractContextManager[None]],
    rows: Sequence[dict[str, Any]],
    size: int,
    seed: int,
    accelerator: Accelerator,
) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """Play an evaluation set on all ranks, `size` episodes at a time on each; return all trajectories and rows.

    All ranks call it together and get the same result. `play` plays tasks with a seed for each, inside one `rollout`
    context. torch's random state is restored afterwards.
    """
    import torch
    from accelerate.utils import gather_object

    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    local = list(rows[rank::num_ranks])
    seeds = [derived_seed(seed, number) for number in range(len(rows))][rank::num_ranks]
    chunks = math.ceil(math.ceil(len(rows) / num_ranks) / size)  # as many on every rank
    played: list[Trajectory] = []
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), rollout():
        torch.manual_seed(seed + rank)  # for engines that take no seeds
        for chunk in range(chunks):
            part = slice(chunk * size, (chunk + 1) * size)
            played += play(local[part], seeds[part])
    pairs = gather_object(list(zip(played, local)))
    return [trajectory for trajectory, _ in pairs], [row for _, row in pairs]
