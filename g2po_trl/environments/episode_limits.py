"""Limits of an episode, under the names of their options; with several environments, also limits of each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ..utils.options import Options, check_options, option, require

_option = partial(option, group="Episodes", plays=True)


def _limit(what: str, reason: str, within: str) -> Any:
    """Return the option of a limit; a failure that exceeds it is named by `reason`."""
    return _option(f"{what}; more is a failure. `None`: no limit.", None, within=within, reason=reason)


@dataclass
class EpisodeLimits(Options):
    """Limits of an episode: turns, tokens, tool calls, seconds and requests.

    An episode out of turns ends as `truncated`. One that exceeds another limit is a failure of the agent, whose
    `failure_reason` begins with the limit's name, such as `tool call limit`. A step that exceeds a limit is still
    played; an episode that it ends has the environment's own outcome.

    Raises:
        G2POError: for a value out of range, or an unknown limit of an environment.
    """

    max_turns: int = _option(
        "Maximum number of turns of an episode. An episode that reaches it ends as `truncated`.", 50, within="[1, inf)"
    )
    max_episode_tokens: int | None = _limit("Tokens that the model may write in an episode", "token limit", "[1, inf)")
    max_tool_calls: int | None = _limit("Tool calls that an episode may make", "tool call limit", "[0, inf)")
    max_episode_seconds: float | None = _limit(
        "Seconds that environment or agent may work on an episode, without waiting for the model",
        "time limit",
        "(0, inf)",
    )
    max_requests: int | None = _limit(
        "Requests that an agent may send, refused ones included", "request limit", "[1, inf)"
    )
    environment_limits: dict[str, Any] | str | None = _option(
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

        `used`: an object with `tokens`, `tool_calls` and `seconds`, as the limits are called; it has no requests.
        """
        for one in fields(EpisodeLimits):
            limit, counted = getattr(self, one.name), one.name.removeprefix("max_").removeprefix("episode_")
            if "reason" in one.metadata and limit is not None and (number := getattr(used, counted, 0)) > limit:
                what = f"{number:.10g} {counted.replace('_', ' ')}, more than {one.name}={limit}"
                return f"{one.metadata['reason']}: {what}"
        return None


# What a failure by a limit is called in `failure_reason`; the last is an `AgentCommand`'s, of processes and disk.
LIMITS = (*(one.metadata["reason"] for one in fields(EpisodeLimits) if "reason" in one.metadata), "program limit")
