"""The verdict of a run that had nothing to learn from, with a remedy.

A `Tally` counts over all rollouts of a run. A checkpoint keeps it, so that the verdict covers the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from ..credit.estimators.registry import estimator_name, row_of
from ..credit.graph import TrajectoryRecord
from .metrics import Summary

ALMOST_NONE, NEARLY_ALL = 0.01, 0.9  # of completions or actions
_EPISODES_ALONE = estimator_name("g2po", {"node_centric": False, "edge_centric": False})
OVERFLOW = "context overflow"  # failure reason of a prompt that exceeds the model's context
MOST = 0.5  # of groups or episodes


class Fault(StrEnum):
    """A fault of an environment, in the order in which they are named."""

    DIFFERENT_STARTS = "different_starts"
    CONTEXT_OVERFLOW = "context_overflow"
    SINGLE_STATE = "single_state"
    NO_REWARD = "no_reward"


# What was seen, with counts of a `Tally`, and what to do.
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


def verdict(tally: Tally, estimator: str = "g2po", penalty: float = 0.0) -> Finding | None:
    """Return why a run had nothing to learn from and what to do next, or `None`.

    `penalty`: `invalid_action_penalty`, by which completions of equal rewards differ.
    """
    if not tally.episodes:
        return None
    if tally.errors == tally.episodes:
        return Finding(
            f"Nothing was learned: {_all(tally.episodes, 'episode')} ended in an environment error",
            "The field `error` in trajectories/ has the reasons; `g2po check` plays the environment without a model.",
        )
    if (finding := cut_off(tally)) is not None:
        return finding
    faults = tally.faults()
    if faults and faults[0] is not Fault.NO_REWARD:
        return Finding(*tally.describe(faults[0]))
    row = row_of(estimator)
    compares = row.compares if row else None  # an own estimator, or a critic
    if tally.unequal_groups:
        is_compared = compares == "steps" and not estimator.startswith(_EPISODES_ALONE)
        if not is_compared or not tally.later_steps or tally.shared_steps:
            return None
        return Finding(
            "No action was compared with another in the same state: after an episode's first step, "
            f"{_all(tally.later_steps, 'step')} were in a state that was visited once in its group",
            "Use coarser state keys (state_key, state_key_ignores); `g2po view` shows how states differ.",
        )
    groups = _all(tally.groups, "group")
    if not tally.successes:
        has_format = penalty and 0 < tally.valid < tally.completions
        what = "Nothing but the format (invalid_action_penalty)" if has_format else "Nothing"
        seen = f"{what} to learn from: {groups} failed in every episode, with equal rewards"
        return Finding(seen, _remedy(tally))
    if tally.successes == tally.episodes - tally.errors:
        seen = f"Success could not rise: {groups} succeeded in every episode, with equal rewards"
        return Finding(seen, "Use harder tasks.")
    if compares is None:  # it may learn from equal rewards of a group
        return None
    return Finding(
        f"Nothing to compare: in {groups} rewards were equal ({tally.successes:,} of {tally.episodes:,} episodes "
        "succeeded)",
        "Use tasks that the model solves sometimes, or larger groups (num_generations).",
    )


def cut_off(tally: Tally) -> Finding | None:
    """Return a finding if nearly all completions were cut off."""
    if tally.cut <= NEARLY_ALL * tally.completions:
        return None
    return Finding(
        f"Completions do not end: {tally.cut:,} of {tally.completions:,} reached max_completion_length, so what "
        "follows an answer is trained like the answer",
        "Raise max_completion_length, or let completions end earlier (stop_sequences, the tokenizer's eos_token)."
        + (f" {_none(tally.called, tally.offered, 'completion')} called a tool." if _calls_none(tally) else ""),
    )


def _calls_none(tally: Tally) -> bool:
    """Return whether tools were offered, and almost no completion called one."""
    return tally.offered > 0 and tally.called < ALMOST_NONE * tally.offered


def _remedy(tally: Tally) -> str:
    """Return why groups failed, and what to do about it."""
    if not tally.completions:
        return "No episode had a step: see `failure_reason` in trajectories/. Is max_prompt_length too small?"
    if tally.valid < ALMOST_NONE * tally.completions:
        return (
            f"{_none(tally.valid, tally.completions, 'completion')} had the required format: read some `completion` "
            "in trajectories/, change the prompt template, or fine-tune the model on demonstrations (`g2po teach`)."
        )
    if _calls_none(tally):
        return (
            f"{_none(tally.called, tally.offered, 'completion')} called a tool: read some `completion` in "
            "trajectories/, compare the prompt that `g2po check --show --model MODEL` prints, use a model that was "
            "trained to call tools, or fine-tune it on demonstrations (`g2po teach`)."
        )
    if tally.listed and tally.admissible < ALMOST_NONE * tally.listed:
        return (
            f"{_none(tally.admissible, tally.listed, 'action')} was among those that the environment listed, although "
            f"{tally.valid / tally.completions:.1%} of the completions had the required format. Use a stronger model, "
            "or fine-tune it on demonstrations (`g2po teach`)."
        )
    if Fault.NO_REWARD in tally.faults():
        text, remedy = tally.describe(Fault.NO_REWARD)
        return f"{text}. {remedy} If it does, start from a model fine-tuned on demonstrations (`g2po teach`)."
    return "Start from a larger model or one fine-tuned on demonstrations (`g2po teach`), or from easier tasks."


def _all(number: int, thing: str) -> str:
    return f"the only {thing}" if number == 1 else f"all {number:,} {thing}s"


def _none(number: int, of: int, thing: str) -> str:
    return f"{'Almost no' if number else 'No'} {thing} ({number:,} of {of:,})"
