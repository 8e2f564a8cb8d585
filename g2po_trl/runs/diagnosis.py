"""Faults of an environment that keep a model from learning: they are looked for before the model is blamed.

`g2po check`, the end of training, reports and the viewer read the same diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..credit.graph import TrajectoryRecord

OVERFLOW = "context overflow"  # failure reason of a prompt that exceeds the model's context
MOST = 0.5  # of groups or episodes


class Fault(StrEnum):
    """A fault of an environment, in the order in which they are named."""

    DIFFERENT_STARTS = "different_starts"
    CONTEXT_OVERFLOW = "context_overflow"
    SINGLE_STATE = "single_state"
    NO_REWARD = "no_reward"


# What was seen, with counts of `Evidence`, and what to do.
WORDING = {
    Fault.DIFFERENT_STARTS: (
        "{different_starts:,} of {groups:,} groups began in different states, so their episodes cannot be compared",
        "Make reset deterministic in the task's columns, and leave times and random names out of the first "
        "observation or its state_key.",
    ),
    Fault.CONTEXT_OVERFLOW: (
        "{overflows:,} of {counted:,} episodes ended because the prompt exceeded the model's context",
        "Lower max_prompt_length so that prompt and completion fit, shorten observations, or use a model with a "
        "longer context.",
    ),
    Fault.SINGLE_STATE: (
        "{single_states:,} of {groups:,} groups have one state only, so no action is told from another by where it "
        "leads",
        "Show in the observation or the state_key what an action changes.",
    ),
    Fault.NO_REWARD: (
        "{ended:,} of {counted:,} episodes were ended by the environment, and no episode was rewarded",
        "Check that the environment pays for success: let an expert play (`g2po check`), or play yourself "
        "(`g2po play`).",
    ),
}


@dataclass
class Evidence:
    """Counts over episodes and groups, from which a fault of the environment is named.

    Args:
        episodes, errors, successes: number of episodes, those that ended in an error or were lost, successful ones.
        overflows: number of episodes that ended because the prompt exceeded the model's context.
        ended: number of episodes that the environment itself ended.
        rewarded: number of episodes that succeeded or had a positive reward.
        groups: number of groups with a result.
        different_starts: number of groups whose episodes began in different states.
        single_states: number of groups with one state, although an episode has several steps.
    """

    episodes: int = 0
    errors: int = 0
    successes: int = 0
    overflows: int = 0
    ended: int = 0
    rewarded: int = 0
    groups: int = 0
    different_starts: int = 0
    single_states: int = 0

    @property
    def counted(self) -> int:
        """Number of episodes with a result."""
        return self.episodes - self.errors

    def add_episodes(self, records: Iterable[TrajectoryRecord]) -> None:
        """Count episodes, without comparing them."""
        for episode in records:
            self.episodes += 1
            self.errors += not episode.counted
            self.successes += episode.outcome == "success"
            if episode.counted:
                self.overflows += (episode.failure_reason or "").startswith(OVERFLOW)
                self.ended += episode.outcome != "truncated" and not episode.failure_reason
                self.rewarded += episode.outcome == "success" or episode.reward > 0

    def add_group(self, group: Sequence[TrajectoryRecord]) -> None:
        """Count the episodes of a group, and compare them."""
        self.add_episodes(group)
        played = [episode.keys for episode in group if episode.counted]
        self.groups += bool(played)
        self.different_starts += len({keys[0] for keys in played if keys}) > 1
        self.single_states += len({key for keys in played for key in keys}) == 1 < max(map(len, played))

    def faults(self) -> list[Fault]:
        """Return the environment's faults, the first to correct first."""
        seen = {
            Fault.DIFFERENT_STARTS: self.different_starts > MOST * self.groups,
            Fault.CONTEXT_OVERFLOW: self.overflows > MOST * self.counted,
            Fault.SINGLE_STATE: self.single_states > MOST * self.groups,
            Fault.NO_REWARD: not self.rewarded and self.ended > MOST * self.counted,
        }
        return [fault for fault in Fault if seen[fault]]

    def describe(self, fault: Fault) -> tuple[str, str]:
        """Return what was seen of a fault, and what to do, as sentences without and with a full stop."""
        text, remedy = WORDING[fault]
        return text.format(**vars(self), counted=self.counted), remedy
