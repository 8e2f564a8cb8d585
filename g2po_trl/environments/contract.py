"""The environment contract: what a user writes to train an agent on a task of their own.

    class MyEnvironment(TextEnvironment):
        def reset(self, **task) -> Observation: ...        # one row of the dataset, by keyword
        def step(self, action: str) -> StepResult: ...

`reset` is deterministic in its arguments: every member of a group gets the same task and must start in the same
state. An environment lives in a worker process and is reset many times; members of one group share a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Observation:
    """What the agent sees.

    Args:
        text: what goes into the prompt.
        state_key: what tells states apart in the graph; `None`: the text does.
        admissible_actions: the actions that can be taken here, listed in the prompt; `None`: not known.
        task: the goal in words, said once on reset; the prompt repeats it at every step.
    """

    text: str
    state_key: str | None = None
    admissible_actions: list[str] | None = None
    task: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What an action led to.

    `reward` is what this step paid; the episode's reward is the sum. `terminated`: the task is over; `truncated`: the
    environment cut it short. `info["success"]` says whether a terminated episode succeeded; without it an episode that
    paid more than 0 did. `info["failure_reason"]` may say, as `"kind"` or `"kind: detail"`, that the agent itself
    ended the episode (its code ran into a time limit, say); kinds are counted. `info["score"]` and every
    `info["score_…"]` are finite numbers: evaluations report their means. `info` is written as JSON: numpy's values
    become numbers and lists, NaN becomes `None`, and what is not plain data its text.
    """

    observation: Observation | str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class TextEnvironment:
    """Base class of environments. `reset` may return a plain string for an `Observation` with that text.

    Attributes:
        prompt_template: of the class: the `PromptTemplate` it is played with where no other is passed, or
            `"module:NAME"` of one. `None`: the default.
    """

    prompt_template: Any = None

    def reset(self, **task) -> Observation | str:
        """Start the task that one dataset row describes. Deterministic in its arguments."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, **task)")

    def step(self, action: str) -> StepResult:
        """Play one action, whatever text it is: an impossible one is answered, not raised."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, action)")

    def close(self) -> None:
        """Free what the environment holds. Called once, when its worker ends."""
