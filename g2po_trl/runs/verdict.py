"""The verdict of a run that had nothing to learn from, with a remedy.

A `Tally` counts over all rollouts of a run. A checkpoint keeps it, so that the verdict covers the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from ..credit.estimators.registry import estimator_name, row_of
from ..credit.graph import TrajectoryRecord
from .metrics import Summary

ALMOST_NONE, MOST, NEARLY_ALL = 0.01, 0.5, 0.9  # of completions, actions, groups or episodes
_EPISODES_ALONE = estimator_name("g2po", {"node_centric": False, "edge_centric": False})
OVERFLOW = "context overflow"  # failure reason of a prompt that exceeds the model's context


@dataclass
class Tally:
    """Counts over the rollouts of a run, of all processes.

    Args:
        episodes, errors, successes: number of episodes, those that ended in an error or were lost, successful ones.
        overflows, ended, rewarded: number of episodes that ended because the prompt exceeded the model's context, that
            the environment itself ended, and that succeeded or had a positive reward.
        groups, unequal_groups: number of trained groups with a result, and of those with unequal rewards.
        different_starts, single_states: number of groups whose episodes began in different states, and of groups with
            one state, although an episode has several steps.
        completions, valid, cut: number of completions, of those with the required format, and of those that reached
            `max_completion_length`, if it is not that of short actions.
        listed, admissible: number of steps for which actions were listed, and of those with an action among them.
        offered, called: number of completions whose prompt offered tools, and of those that called one.
        later_steps, shared_steps: number of steps after the first of an episode, and of those in a state that was
            visited more than once in its group.
    """

    episodes: int = 0
    errors: int = 0
    successes: int = 0
    overflows: int = 0
    ended: int = 0
    rewarded: int = 0
    groups: int = 0
    unequal_groups: int = 0
    different_starts: int = 0
    single_states: int = 0
    completions: int = 0
    valid: int = 0
    cut: int = 0
    listed: int = 0
    admissible: int = 0
    offered: int = 0
    called: int = 0
    later_steps: int = 0
    shared_steps: int = 0

    def add(
        self,
        groups: Iterable[Sequence[TrajectoryRecord]],
        summary: Summary,
        replaced: Iterable[TrajectoryRecord] = (),
    ) -> None:
        """Count a rollout: groups that are trained on, sums of all episodes, and records of `replaced` groups."""
        self._add_episodes(replaced)
        for group in groups:
            self._add_episodes(group)
            counted = [episode for episode in group if episode.counted]
            self.groups += bool(counted)
            self.unequal_groups += len({episode.reward for episode in counted}) > 1
            self.different_starts += len({episode.keys[0] for episode in counted if episode.keys}) > 1
            visits = Counter(key for episode in counted for key in episode.keys)
            later = [key for episode in counted for key in episode.keys[1:]]
            self.single_states += bool(later) and len(visits) == 1
            self.later_steps += len(later)
            self.shared_steps += sum(visits[key] > 1 for key in later)
        totals, numbers = summary.totals, summary.numbers
        self.completions += numbers["valid_action_ratio"]
        self.valid += totals["valid_action_ratio"]
        self.cut += totals["cut"]
        self.listed += numbers["admissible_action_ratio"]
        self.admissible += totals["admissible_action_ratio"]
        self.offered += numbers["tool_call_ratio"]
        self.called += totals["tool_call_ratio"]

    def _add_episodes(self, records: Iterable[TrajectoryRecord]) -> None:
        for episode in records:
            self.episodes += 1
            self.errors += not episode.counted
            self.successes += episode.outcome == "success"
            if episode.counted:
                self.overflows += (episode.failure_reason or "").startswith(OVERFLOW)
                self.ended += episode.outcome != "truncated" and not episode.failure_reason
                self.rewarded += episode.outcome == "success" or episode.reward > 0

    @property
    def counted(self) -> int:
        """Number of episodes with a result."""
        return self.episodes - self.errors

    def faults(self) -> list[Fault]:
        """Return the environment's faults, the first to correct first."""
        return [fault for fault in Fault if fault.holds(self)]

    def restart(self) -> None:
        """Reset all counts: training starts again."""
        self.__init__()

    def state_dict(self) -> dict[str, int]:
        """Return the counts as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counts that `state_dict` returned."""
        self.__init__(**state)


@dataclass(frozen=True)
class Finding:
    """What was seen, without a full stop, and what to do; as text, a paragraph."""

    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.seen}. {self.remedy}"


class _Reason(Enum):
    """What a tally shows: the condition, a sentence with its counts, and what to do."""

    def __init__(self, holds: Callable[[Tally], bool], text: str, remedy: str):
        self.holds, self.wording = holds, (text, remedy)

    def finding(self, tally: Tally) -> Finding:
        """Return its wording with the counts."""
        text, remedy = self.wording
        return Finding(text.format(**vars(tally), counted=tally.counted), remedy)


class Fault(_Reason):
    """A fault of an environment, in the order in which they are named."""

    DIFFERENT_STARTS = (
        lambda t: t.different_starts > MOST * t.groups,
        "{different_starts:,} of {groups:,} groups began in different states, so their episodes cannot be compared",
        "Make reset deterministic in the task's columns, and leave times and random names out of the first "
        "observation or its state_key.",
    )
    CONTEXT_OVERFLOW = (
        lambda t: t.overflows > MOST * t.counted,
        "{overflows:,} of {counted:,} episodes ended because the prompt exceeded the model's context",
        "Lower max_prompt_length so that prompt and completion fit, shorten observations, or use a model with a "
        "longer context.",
    )
    SINGLE_STATE = (
        lambda t: t.single_states > MOST * t.groups,
        "{single_states:,} of {groups:,} groups have one state only, so no action is told from another by where it "
        "leads",
        "Show in the observation or the state_key what an action changes.",
    )
    NO_REWARD = (
        lambda t: not t.rewarded and t.ended > MOST * t.counted,
        "{ended:,} of {counted:,} episodes were ended by the environment, and no episode was rewarded",
        "Check that the environment pays for success: let an expert play (`g2po check`), or play yourself "
        "(`g2po play`).",
    )


class Cause(_Reason):
    """Why a run learns nothing, beside its environment's faults."""

    ERRORS = (
        lambda t: t.errors == t.episodes,
        "Nothing was learned: all {episodes:,} episodes ended in an environment error",
        "The field `error` in trajectories/ has the reasons; `g2po check` plays the environment without a model.",
    )
    CUT_OFF = (
        lambda t: t.cut > NEARLY_ALL * t.completions,
        "Completions do not end: {cut:,} of {completions:,} reached max_completion_length, so what follows an answer "
        "is trained like the answer",
        "Raise max_completion_length, or let completions end earlier (stop_sequences, the tokenizer's eos_token).",
    )
    NEVER_COMPARED = (
        lambda t: t.later_steps and not t.shared_steps,
        "No action was compared with another in the same state: after an episode's first step, all {later_steps:,} "
        "steps were in a state that was visited once in its group",
        "Use coarser state keys (state_key, state_key_ignores); `g2po view` shows how states differ.",
    )
    NO_FORMAT = (
        lambda t: t.valid < ALMOST_NONE * t.completions,
        "{valid:,} of {completions:,} completions had the required format",
        "Read some `completion` in trajectories/, change the prompt template, or fine-tune the model on "
        "demonstrations (`g2po teach`).",
    )
    NO_CALL = (
        lambda t: t.called < ALMOST_NONE * t.offered,
        "{called:,} of {offered:,} completions called a tool",
        "Compare the prompt that `g2po check --show --model MODEL` prints, use a model that was trained to call "
        "tools, or fine-tune it on demonstrations (`g2po teach`).",
    )
    NOT_LISTED = (
        lambda t: t.admissible < ALMOST_NONE * t.listed,
        "{admissible:,} of {listed:,} actions were among those that the environment listed",
        "Use a stronger model, or fine-tune it on demonstrations (`g2po teach`).",
    )
    ALL_FAILED = (
        lambda t: not t.successes,
        "Nothing to learn from: in all {groups:,} groups every episode failed, with equal rewards",
        "Start from a larger model or one fine-tuned on demonstrations (`g2po teach`), or from easier tasks.",
    )
    ALL_SUCCEEDED = (
        lambda t: t.successes == t.counted,
        "Success could not rise: in all {groups:,} groups every episode succeeded, with equal rewards",
        "Use harder tasks.",
    )
    EQUAL_REWARDS = (
        lambda t: not t.unequal_groups,
        "Nothing to compare: in all {groups:,} groups rewards were equal ({successes:,} of {episodes:,} episodes "
        "succeeded)",
        "Use tasks that the model solves sometimes, or larger groups (num_generations).",
    )


def reason_of(tally: Tally, estimator: str = "g2po") -> Cause | Fault | None:
    """Return why a run had nothing to learn from, or `None`."""
    if not tally.episodes:
        return None
    row = row_of(estimator)
    compares = row.compares if row else None  # `None`: an own estimator, or a critic, may learn from equal rewards
    reasons = [Cause.ERRORS, Cause.CUT_OFF, Fault.DIFFERENT_STARTS, Fault.CONTEXT_OVERFLOW, Fault.SINGLE_STATE]
    if tally.unequal_groups:
        is_compared = compares == "steps" and not estimator.startswith(_EPISODES_ALONE)
        reasons += [Cause.NEVER_COMPARED] if is_compared else []
    else:
        model = [] if tally.successes else [Cause.NO_FORMAT, Cause.NO_CALL, Cause.NOT_LISTED, Fault.NO_REWARD]
        reasons += [*model, Cause.ALL_FAILED, Cause.ALL_SUCCEEDED, *([Cause.EQUAL_REWARDS] if compares else [])]
    return next((reason for reason in reasons if reason.holds(tally)), None)


def verdict(tally: Tally, estimator: str = "g2po") -> Finding | None:
    """Return why a run had nothing to learn from and what to do next, or `None`."""
    reason = reason_of(tally, estimator)
    return reason and reason.finding(tally)
