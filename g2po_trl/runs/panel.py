"""Panels: fixed sets of tasks, and their episodes in one pass over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..environments.contract import TextEnvironment
from ..rollout.prompting import DEFAULT_PROMPT, PromptTemplate
from ..rollout.sampling import derived_seed
from ..trajectory import Trajectory

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Panel:
    """A fixed set of tasks, and how they are played.

    Args:
        name: for tables. rows: the tasks. environment_factory: plays them.
        prompt_template, max_turns, history_length: of a trained agent, as its recipe sets them.
        about, action_form: for prompting agents: what the environment is and what can be done in it, and how an action
            is written.
        multiline, lower_case: for the same: whether an action may have several lines, and whether it is played in
            lower case (else as listed, regardless of case, or as written).
        columns: the row of the paper's table: heading -> what `g2po_trl.runs.evaluation.summarize` calls it; a kind
            of task as "success_rate_by_type/<kind>".
        data: what the tasks are made of, e.g. a hash of their files: part of what numbers belong to.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    environment_factory: Callable[[], TextEnvironment]
    prompt_template: PromptTemplate = DEFAULT_PROMPT
    max_turns: int = 30
    history_length: int = 2
    about: str = "You act in an environment that answers in text."
    action_form: str = "the action, exactly as listed"
    multiline: bool = False
    lower_case: bool = False
    columns: Mapping[str, str] = field(default_factory=lambda: {"Succ.": "success_rate"})
    data: str = ""


def play_panel(
    play: Callable[[list[dict[str, Any]], list[int]], list[Trajectory]],
    rollout: Callable[[], AbstractContextManager[None]],
    rows: Sequence[dict[str, Any]],
    size: int,
    seed: int,
    accelerator: Accelerator,
) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """All ranks' episodes of a panel, each rank's `size` at a time; all ranks call it together.

    Args:
        play: tasks and a seed for each -> their trajectories. rollout: around all of its calls.
        seed: of the replies; torch's random state is as before afterwards.

    Returns:
        The trajectories and the rows they belong to, on every rank.
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
