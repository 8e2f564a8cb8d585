"""Evaluate a tiny model with the real rollout, in this process.

Training runs use the trainer's evaluation. This module is for making the model itself, without a trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.transformers import TransformersEngine, model_for_generation
from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.prompts.template import PromptTemplate
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.player import Player
from g2po_trl.trajectory import Trajectory


class _LocalPool:
    """Environments of this process, behind the part of the pool's interface that a rollout uses."""

    environment_names = ()

    def __init__(self, make_environment: Callable[[], TextEnvironment], size: int):
        self.environments = [make_environment() for _ in range(size)]

    def begin(self, tasks: Sequence[dict[str, Any]], groups: Sequence[Any], retry_group: Any = None) -> list[int]:
        self.answers = dict(enumerate(e.reset(**task) for e, task in zip(self.environments, tasks)))
        return list(self.answers)

    def send(self, actions: Mapping[int, str]) -> None:
        self.answers |= {slot: self.environments[slot].step(action) for slot, action in actions.items()}

    def receive(self, timeout: float | None) -> dict[int, Observation | StepResult]:
        answers, self.answers = self.answers, {}
        return answers

    def end(self, slots: Iterable[int]) -> None:
        """Do nothing: episodes use no resources of the pool."""


def play(
    model,
    tokenizer,
    make_environment: Callable[[], TextEnvironment],
    template: PromptTemplate,
    history_length: int,
    rows: Sequence[dict[str, Any]],
    temperature: float = 1.0,
    max_turns: int = 15,
    seed: int = 0,
    batch_size: int = 48,
    max_completion_length: int = 24,
) -> list[Trajectory]:
    """Play one episode per row, and return one trajectory per row, in order."""
    torch.manual_seed(seed)
    width = max_completion_length + 512  # of a prompt, about
    engine = TransformersEngine(
        tokenizer, [tokenizer.eos_token_id], model_for_generation(model), batch_tokens=batch_size * width
    )
    actor = PromptActor(engine, ChatEncoder(tokenizer), template, history_length)
    player = Player(_LocalPool(make_environment, len(rows)), actor, EpisodeLimits(max_turns))
    return player.play(rows, Sampling(temperature, max_completion_length=max_completion_length))[0]


def summarize(trajectories: Sequence[Trajectory], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return success rates (also by task type), mean turns, ratios of well-formed and of admissible completions."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    scores = [t.info["score"] for t in trajectories if "score" in t.info]
    by_type = defaultdict(list)
    for trajectory, row in zip(trajectories, rows):
        by_type[row["task_type"]].append(trajectory.success)
    return {
        "episodes": len(trajectories),
        "success": round(sum(t.success for t in trajectories) / len(trajectories), 3),
        **({"score": round(sum(scores) / len(trajectories), 3)} if scores else {}),
        "turns": round(len(steps) / len(trajectories), 1),
        "well_formed": round(sum(step.valid for step in steps) / len(steps), 3),
        "admissible": round(sum(s.valid and s.action in (s.admissible_actions or ()) for s in steps) / len(steps), 3),
        "completion_tokens": round(sum(len(step.completion_ids) for step in steps) / len(steps), 1),
        "prompt_tokens": round(sum(len(step.prompt_ids) for step in steps) / len(steps), 1),
        "by_type": {name: round(sum(won) / len(won), 2) for name, won in sorted(by_type.items())},
    }
