"""What an episode leaves behind: plain data, in memory and as JSON lines.

A *trajectory* is one episode of one task; a *step* is one observation and the reply it got. Everything after the
rollout (state graph, advantages, step batch, viewer) is computed from these two classes and from nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .json_text import to_json

OUTCOMES = ("success", "failure", "truncated", "error", "lost")
UNCOUNTED = ("error", "lost")  # no result: in no statistic, trains nothing


@dataclass
class Step:
    """One observation and the reply to it.

    `state_key` is what tells states apart in the graph; `None` means the observation's text does. `valid` says that
    the reply had the required format. `prompt_ids`, `completion_ids` and `logprobs` are what the engine read, wrote
    and how likely it found it: they are the training sample, never decoded and encoded again. `prompt` is for agents
    that are asked by text: the last message they read. `advantage` is what the step was trained with.
    """

    observation: str
    action: str
    valid: bool = True
    state_key: str | None = None
    reply: str | None = None
    admissible_actions: list[str] | None = None
    reward: float = 0.0
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    prompt_truncated: bool = False
    completion_truncated: bool = False
    prompt: str | None = None
    advantage: float | None = None

    @property
    def key(self) -> str:
        return self.observation if self.state_key is None else self.state_key


@dataclass
class Trajectory:
    """One episode of one task.

    `reward` is what the episode paid in total. `outcome` is one of `"success"`, `"failure"`, `"truncated"` (out of
    turns: a failure, recorded apart), `"error"` (the environment raised, hung or died) and `"lost"` (another episode
    took its worker along, and it could not be played again). The last two are in no statistic and train nothing;
    `error` then holds the reason. `failure_reason` says why the agent itself ended an episode before its task was
    over, as `"kind"` or `"kind: detail"`, e.g. `"prompt too long: …"`; `None` if it did not. Such an episode is a
    failure. `group` numbers the trajectories of a rollout that were compared with each other. `task` is the task in
    words, as the environment gave it on reset (`Observation.task`); `None` if it gave none.
    """

    task_id: str
    steps: list[Step]
    reward: float
    outcome: str
    final_observation: str | None = None
    error: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    failure_reason: str | None = None
    group: int | None = None
    task: str | None = None

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome is {self.outcome!r}; it must be one of {', '.join(OUTCOMES)}")

    @property
    def success(self) -> bool:
        return self.outcome == "success"

    @property
    def counted(self) -> bool:
        """Did it come to a result? Trajectories without one are in no statistic and train nothing."""
        return self.outcome not in UNCOUNTED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        known, known_step = {f.name for f in fields(cls)}, {f.name for f in fields(Step)}
        unknown = (set(data) - known) | {f"steps.{k}" for step in data["steps"] for k in set(step) - known_step}
        if unknown:
            raise ValueError(f"unknown trajectory fields {sorted(unknown)}: written by a newer version of g2po_trl?")
        return cls(**{**data, "steps": [Step(**step) for step in data["steps"]]})


def note_advantages(trajectories: Sequence[Trajectory], advantages: Sequence[float], groups: Sequence[int]) -> None:
    """Write down in trajectories what they are trained with: `advantages` of their steps in order, and `groups`."""
    of_step = iter(advantages)
    for trajectory, group in zip(trajectories, groups, strict=True):
        trajectory.group = group
        for step in trajectory.steps:
            advantage = float(next(of_step))
            step.advantage = advantage if trajectory.counted else None


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory], append: bool = False) -> None:
    """Write one trajectory a line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(to_json(trajectory.to_dict()) + "\n")


def read_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """Read what `write_jsonl` wrote, one trajectory at a time."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield Trajectory.from_dict(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: not a trajectory ({error})") from error
