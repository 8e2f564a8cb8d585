"""A running episode: its observation and steps, and its outcome."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..environments.contract import Observation, StepResult
from ..environments.pool.pool import EnvironmentFailure
from ..prompts.conversation import ChatResponse
from ..prompts.conversation_encoder import Transcript
from ..trajectory import Step, Trajectory, stored_row


@dataclass
class Episode:
    """A running episode.

    `number` is its place among the episodes played together; `outcome` is `None` while it is running; `transcript` has
    the token ids of a conversation. `environment` is the name of its environment, in a run with several, and `row` the
    row of its task. `seconds` is the environment's time, `reported` a server's counts of tokens, see `usage`.
    """

    task_id: str
    number: int = 0
    observation: Observation | None = None
    task: str = ""
    steps: list[Step] = field(default_factory=list)
    reward: float = 0.0
    outcome: str | None = None
    error: str | None = None
    failure_reason: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    transcript: Transcript | None = None
    environment: str | None = None
    seconds: float = 0.0
    reported: list[tuple[int, int]] = field(default_factory=list)
    row: dict[str, Any] | None = None

    @property
    def usage(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and of its completion."""
        return self.reported or [(len(step.prompt_ids), len(step.completion_ids)) for step in self.steps]

    @property
    def tokens(self) -> int:
        """Number of tokens that the model has written."""
        return sum(written for _, written in self.usage)

    @property
    def tool_calls(self) -> int:
        """Number of tool calls that the model has written."""
        return sum(step.tool_calls for step in self.steps)

    @property
    def turns(self) -> int:
        """Number of steps since the reset."""
        return len(self.steps)

    def open(self, seen: Observation | EnvironmentFailure) -> None:
        """Begin with the environment's answer to `reset`."""
        if isinstance(seen, EnvironmentFailure):
            self.end_without_result(seen)
        else:
            self.observation, self.task = seen, seen.task or ""

    def step(self, action: str, completion: str | None, **fields: Any) -> Step:
        """Return the step that answers the current observation; `fields` are further fields of `Step`."""
        seen = self.observation
        return Step(
            observation=seen.text,
            action=action,
            state_key=seen.state_key,
            completion=completion,
            admissible_actions=seen.admissible_actions,
            images=list(seen.images) or None,
            **fields,
        )

    def advance(self, result: StepResult | EnvironmentFailure) -> None:
        """Continue with the environment's answer to the last step."""
        if isinstance(result, EnvironmentFailure):
            self.end_without_result(result)
            return
        self.steps[-1].reward += result.reward
        self.reward += result.reward
        self.info = result.info  # of the last step, also where a limit makes it the last
        if self.outcome is not None:  # ended by a limit, and paid
            return
        self.observation = result.observation
        if result.terminated or result.truncated:
            success = result.info.get("success", self.reward > 0)
            self.outcome = "truncated" if not result.terminated else "success" if success else "failure"
            if self.outcome != "success" and (reason := result.info.get("failure_reason")):
                self.failure_reason = str(reason)

    def give_up(self, reason: str) -> None:
        """End as a failure of the agent, with the reward received so far. `reason`: "kind" or "kind: detail"."""
        self.outcome, self.failure_reason = "failure", reason

    def end_without_result(self, failure: EnvironmentFailure) -> None:
        """End because the environment failed: as an error, or as lost with its worker.

        What fails in a worker (`run_job`) comes here by `EnvironmentPool._on_message` and `Loop._take`.
        """
        self.outcome = "lost" if failure.kind == "lost" else "error"
        self.error, self.failure_reason = f"{failure.kind}: {failure.message}", None

    def trajectory(self) -> Trajectory:
        """Return the episode as a trajectory; without an outcome it ran out of turns."""
        final = self.observation.text if self.observation else None
        return Trajectory(
            self.task_id,
            self.steps,
            self.reward,
            self.outcome or "truncated",
            final,
            self.error,
            self.info,
            self.failure_reason,
            task=self.task or None,
            environment=self.environment,
            row=None if self.row is None else stored_row(self.row),
        )


def sent(step: Step) -> str:
    """Return what the environment receives of a step: its action or, if it sent a chat request, the response."""
    if step.messages is None:
        return step.action
    answer = json.loads(step.action)
    calls = tuple(answer.get("tool_calls", ()))
    # Clients carry out calls only if the reason names them; those of a completion that was cut off are complete.
    reason = "tool_calls" if calls else "length" if step.completion_truncated else "stop"
    return ChatResponse(answer["content"], calls, reason, len(step.prompt_ids), len(step.completion_ids)).to_action()
