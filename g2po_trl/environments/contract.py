"""The contract of an environment: `TextEnvironment`, the interface to implement for your own task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..prompts.conversation import ChatRequest


@dataclass(frozen=True)
class Observation:
    """An observation of the agent.

    Args:
        text: the text shown in the prompt.
        state_key: steps with equal keys are in the same state of the graph. `None`: the text is the key.
        admissible_actions: the actions that can be executed in this state; the prompt lists them. `None`: unknown.
        task: the goal in words. Return it from `reset`; the prompt repeats it at every step.
        request: the chat messages and tools of the prompt, instead of a prompt made of the fields above. The action is
            then a `ChatResponse` as JSON. `None`: the trainer's prompt template makes the prompt.
        images: images shown before the text: PIL images, paths, uint8 arrays (height, width, 3) or data URLs. Needs a
            vision-language model. Without a `state_key`, the images and the text are the key. A request has its own
            images in its messages.
    """

    text: str
    state_key: str | None = None
    admissible_actions: list[str] | None = None
    task: str | None = None
    request: ChatRequest | None = None
    images: Sequence[Any] = ()


@dataclass(frozen=True)
class StepResult:
    """The outcome of an action.

    Args:
        observation: the next observation; a string is an `Observation` with that text.
        reward: the reward of this step. An episode's reward is the sum over its steps.
        terminated: whether the task is over.
        truncated: whether the environment ended the episode early, e.g. at its own time limit.
        info: facts about the episode so far, read at its last step, also if `max_turns` ends it. `success`, read with
            `terminated`, is whether the episode succeeded (default: its reward is above 0); a truncated episode is a
            failure. `failure_reason`, `"kind"` or `"kind: detail"`, marks an episode ended by the agent's own mistake;
            failures are counted by kind. `score` and `score_…` must be finite numbers; evaluations report their means.
            Written as JSON: numpy values become numbers and lists, NaN becomes `None`, other objects their text.
    """

    observation: Observation | str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class TextEnvironment:
    """Base class of environments: define `reset` and `step`.

    An environment runs in a worker process and plays many episodes, one after the other. It is constructed without
    arguments; bind arguments with `functools.partial`.

    Class attribute `prompt_template`: the `PromptTemplate` used if the trainer gets none. `None`: `DEFAULT_PROMPT`.
    """

    prompt_template: Any = None
    runs_agent = False  # of a user, whose requests are the observations

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
            action: any text. Return an observation for an impossible action; an exception ends the episode as an
                error.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(self, action)")

    def close(self) -> None:
        """Free resources. Called once, before the worker process ends."""

    def end_episode(self) -> None:
        """Stop what still works on an episode. Called after each one, also if it was ended early."""

    def needs_new_worker(self) -> bool:
        """Return whether the worker process must be replaced; the episodes that it plays are replayed in another."""
        return False
