"""Limits of an episode, under the names of their options; with several environments, also limits of each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ..utils.options import Options, check_options, option, require

_limit = partial(option, group="Episodes", plays=True)


@dataclass
class EpisodeLimits(Options):
    """Limits of an episode: turns, tokens, tool calls, seconds and requests.

    An episode out of turns ends as `truncated`. One that exceeds another limit is a failure of the agent, whose
    `failure_reason` begins with the limit's name, such as `tool call limit`. A step that exceeds a limit is still
    played; an episode that it ends has the environment's own outcome.

    Raises:
        G2POError: for a value out of range, or an unknown limit of an environment.
    """

    max_turns: int = _limit(
        "Maximum number of turns of an episode. An episode that reaches it ends as `truncated`.", 50, within="[1, inf)"
    )
    max_episode_tokens: int | None = _limit(
        "Tokens that the model may write in an episode; more is a failure. `None`: no limit.",
        None,
        within="[1, inf)",
        counts="tokens",
        reason="token limit",
    )
    max_tool_calls: int | None = _limit(
        "Tool calls that an episode may make; more is a failure. `None`: no limit.",
        None,
        within="[0, inf)",
        counts="tool_calls",
        reason="tool call limit",
    )
    max_episode_seconds: float | None = _limit(
        "Seconds that environment or agent may work on an episode, without waiting for the model; more is a failure. "
        "`None`: no limit.",
        None,
        within="(0, inf)",
        counts="seconds",
        reason="time limit",
    )
    max_requests: int | None = _limit(
        "Requests that an agent may send, refused ones included; more is a failure. `None`: no limit.",
        None,
        within="[1, inf)",
        reason="request limit",
    )
    environment_limits: dict[str, Any] | str | None = _limit(
        'Limits of single environments, by name, if there are several: `{"coder": {"max_turns": 40}}`.', None
    )

    def __post_init__(self):
        super().__post_init__()
        for name, limits in (self.environment_limits or {}).items():
            require(isinstance(limits, dict), f"environment_limits[{name!r}]", limits, 'write {"max_turns": 40}')
            own = {one.name: None for one in fields(EpisodeLimits) if one.name != "environment_limits"}
            check_options(f"environment_limits[{name!r}]", limits, own, "an environment")
            EpisodeLimits(**limits)

    def by(self, environment: str | None) -> EpisodeLimits:
        """Return the limits of an environment, by its name in a run with several."""
        own = (self.environment_limits or {}).get(environment)
        return self if own is None else replace(self, **own, environment_limits=None)

    @property
    def most_turns(self) -> int:
        """Largest `max_turns` of all environments."""
        return max(self.max_turns, *(self.by(name).max_turns for name in self.environment_limits or ()), 0)

    def exceeded(self, used: Any) -> str | None:
        """Return the failure reason if an episode has exceeded a limit, else `None`.

        `used`: an object with the attributes `tokens`, `tool_calls` and `seconds`; only those with a limit are read.
        """
        for one in fields(EpisodeLimits):
            limit, counted = getattr(self, one.name), one.metadata.get("counts")
            if counted and limit is not None and (number := getattr(used, counted)) > limit:
                what = f"{number:.10g} {counted.replace('_', ' ')}"
                return f"{one.metadata['reason']}: {what}, more than {one.name}={limit}"
        return None


# What a failure by a limit is called in `failure_reason`; the last is an `AgentCommand`'s, of processes and disk.
LIMITS = tuple(one.metadata["reason"] for one in fields(EpisodeLimits) if one.metadata.get("reason"))
LIMITS += ("program limit",)
