"""The contract of an environment: what to write to train an agent on your own task.

    class MyEnvironment(TextEnvironment):
        def reset(self, **task) -> Observation: ...        # one row of the dataset, by keyword
        def step(self, action: str) -> StepResult: ...

`reset` is deterministic in its arguments: the episodes of a group play the same task and must start in the same state.
An environment lives in a worker process and is reset many times; episodes of one group share a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Observation:
    """What the agent sees.

    Args:
        text: shown in the prompt.
        state_key: steps with equal keys are in the same state of the graph. `None`: the text is the key.
        admissible_actions: the actions that can be executed here; the prompt lists them. `None`: not known.
        task: the goal in words. Return it from `reset`; the prompt repeats it at every step.
    """

    text: str
    state_key: str | None = None
    admissible_actions: list[str] | None = None
    task: str | None = None


@dataclass(frozen=True)
class StepResult:
    """The outcome of an action.

    Args:
        observation: what the agent sees next; a string is an `Observation` with that text.
        reward: the reward of this step. An episode's reward is the sum over its steps.
        terminated: the task is over.
        truncated: the environment ended the episode early, e.g. at a time limit of its own.
        info: facts about the episode so far, read in its last step, also where `max_turns` ends it. `success`, read
            with `terminated`, tells whether it succeeded (default: whether its reward is above 0): an episode that was
            truncated is a failure. `failure_reason`, as `"kind"` or `"kind: detail"`, tells that the agent itself
            ended the episode; failures are counted by kind. `score` and every `score_…` are finite numbers, whose
            means evaluations report. Written as JSON: numpy values become numbers and lists, NaN becomes `None`, other
            objects their text.
    """

    observation: Observation | str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class TextEnvironment:
    """Base class of environments: define `reset` and `step`.

    An environment lives in a worker process and plays many episodes, one after the other. It is made without
    arguments; pass those it needs by `functools.partial`.
    """

    prompt_template: Any = None

    def reset(self, **task) -> Observation | str:
        """Start a task.

        Args:
            **task: the columns of one dataset row. Equal rows must start in equal states: the episodes of a group are
                compared.

        Returns:
            The first observation; a string is an `Observation` with that text.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, **task)")

    def step(self, action: str) -> StepResult:
        """Play one action.

        Args:
            action: any text. Answer an impossible action with an observation; raising an exception ends the episode as
                an error.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(self, action)")

    def close(self) -> None:
        """Free resources. Called once, when the worker process ends."""
