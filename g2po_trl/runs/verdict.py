"""The verdict of a run that had nothing to learn from, with a remedy, from counts that a checkpoint keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from ..credit.estimators.registry import estimator_name, row_of
from ..credit.graph import TrajectoryRecord, record
from ..trajectory import Trajectory
from .metrics import Summary

ALMOST_NONE, MOST, NEARLY_ALL = 0.01, 0.5, 0.9  # of completions, actions, groups or episodes
_EPISODES_ALONE = estimator_name("g2po", {"node_centric": False, "edge_centric": False})


class Tally(Counter):
    """Counts over the rollouts of a run, of all processes, by the names in `add`."""

    def add(self, groups: Iterable[Sequence[TrajectoryRecord]], summary: Summary) -> None:
        """Count a rollout: the groups that are trained on, and the sums of all episodes that were played."""
        totals, numbers = summary.totals, summary.numbers
        self.update(
            episodes=summary.episodes,
            errors=totals["error_rate"] + totals["lost_rate"],
            counted=numbers["success_rate"],  # with a result
            successes=totals["success_rate"],
            rewarded=totals["rewarded"],  # succeeded, or had a positive reward
            ended=totals["ended"],  # by the environment itself
            early=totals["failure_reason_rate"],
            **{f"reason {name[1]}": number for name, number in numbers.items() if name[0] == "reason"},
            completions=numbers["valid_action_ratio"],
            valid=totals["valid_action_ratio"],
            cut=totals["cut"],  # reached `max_completion_length`, if it is not that of short actions
            listed=numbers["admissible_action_ratio"],  # steps for which actions were listed
            admissible=totals["admissible_action_ratio"],  # of these, with a listed action
            offered=numbers["tool_call_ratio"],  # completions whose prompt offered tools
            called=totals["tool_call_ratio"],
        )
        for group in groups:
            counted = [episode for episode in group if episode.counted]
            visits = Counter(key for episode in counted for key in episode.keys)
            later = [key for episode in counted for key in episode.keys[1:]]
            self.update(
                groups=bool(counted),
                unequal_groups=len({episode.reward for episode in counted}) > 1,
                different_starts=len({episode.keys[0] for episode in counted if episode.keys}) > 1,
                single_states=bool(later) and len(visits) == 1,  # although an episode has several steps
                later_steps=len(later),
                shared_steps=sum(visits[key] > 1 for key in later),  # in a state that was visited more than once
            )

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]], replaced: Sequence[Trajectory] = ()) -> Tally:
        """Return the counts of recorded groups, and of trajectories of groups that were `replaced`."""
        tally = cls()
        tally.add([list(map(record, group)) for group in groups], Summary.of([*chain(*groups, replaced)]))
        return tally

    @property
    def reason(self) -> str:
        """The most common reason for which episodes ended early."""
        reasons = [name for name in self if name.startswith("reason ")]
        return max(reasons, key=self.get, default="").removeprefix("reason ")

    def state_dict(self) -> dict[str, int]:
        """Return the counts as plain data."""
        return dict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counts that `state_dict` returned; without any, begin again."""
        self.clear()
        self.update(state)


class Cause(Enum):
    """Why a run learns nothing: a condition on its tally, a sentence with the counts, and what to do."""

    DIFFERENT_STARTS = (
        lambda t: t["different_starts"] > MOST * t["groups"],
        "{different_starts:,} of {groups:,} groups began in different states, so their episodes cannot be compared",
        "Make reset deterministic in the task's columns, and leave times and random names out of the first state_key.",
    )
    CONTEXT_OVERFLOW = (
        lambda t: t["reason context overflow"] > MOST * t["counted"],
        "{reason context overflow:,} of {counted:,} episodes ended because the prompt exceeded the model's context",
        "Lower max_prompt_length so that prompt and completion fit, or shorten observations.",
    )
    SINGLE_STATE = (
        lambda t: t["single_states"] > MOST * t["groups"] and not any(cause.holds(t) for cause in WITHOUT_EFFECT),
        "{single_states:,} of {groups:,} groups have one state only, so actions do not differ in where they lead",
        "Show in the observation or the state_key what an action changes.",
    )
    NO_REWARD = (
        lambda t: not t["rewarded"] and t["ended"] > ALMOST_NONE * t["counted"],
        "{ended:,} of {counted:,} episodes were ended by the environment, and no episode was rewarded",
        "Check that success is rewarded: let an expert play (`g2po check`). If so, teach the model (`g2po teach`).",
    )
    ERRORS = (
        lambda t: t["errors"] == t["episodes"],
        "Nothing was learned: all {episodes:,} episodes ended in an environment error",
        "The field `error` in trajectories/ has the reasons; `g2po check` plays the environment without a model.",
    )
    CUT_OFF = (
        lambda t: t["cut"] > NEARLY_ALL * t["completions"],
        "Completions do not end: {cut:,} of {completions:,} reached max_completion_length, and all of it is trained",
        "Raise max_completion_length, or let completions end earlier (stop_sequences, the tokenizer's eos_token).",
    )
    NEVER_COMPARED = (
        lambda t: t["later_steps"] and not t["shared_steps"],
        "No action was compared with another: all {later_steps:,} later steps were in a state that was visited once",
        "Use coarser state keys (state_key, state_key_ignores); `g2po view` shows how states differ.",
    )
    NO_FORMAT = (
        lambda t: t["valid"] < ALMOST_NONE * t["completions"],
        "{valid:,} of {completions:,} completions had the required format",
        "Read some in trajectories/, change the prompt template, or teach the model (`g2po teach`).",
    )
    NO_CALL = (
        lambda t: t["called"] < ALMOST_NONE * t["offered"],
        "{called:,} of {offered:,} completions called a tool",
        "Use a model that was trained to call tools, or fine-tune it on demonstrations (`g2po teach`).",
    )
    NOT_LISTED = (
        lambda t: t["admissible"] < ALMOST_NONE * t["listed"],
        "{admissible:,} of {listed:,} actions were among those that the environment listed",
        "Use a stronger model, or fine-tune it on demonstrations (`g2po teach`).",
    )
    ENDED_EARLY = (
        lambda t: t["early"] > MOST * t["counted"],
        "{early:,} of {counted:,} episodes ended early, most of them by {reason!r}",
        "Fix what raised, raise the limit, or shorten prompts: `failure_reason` in trajectories/ has the details.",
    )
    NOT_ENDED = (
        lambda t: t["counted"] and not t["ended"],
        "None of {counted:,} episodes came to an end within its turns",
        "Raise max_turns, use tasks that need fewer steps, or fine-tune the model first (`g2po teach`).",
    )
    EQUAL_REWARDS = (
        lambda t: not t["unequal_groups"],
        "Nothing to compare: {successes:,} of {episodes:,} episodes succeeded, with equal rewards in each group",
        "Use tasks that the model solves sometimes, a larger or fine-tuned model (`g2po teach`), or larger groups.",
    )

    def __init__(self, holds: Callable[[Tally], bool], text: str, remedy: str):
        self.holds, self.wording = holds, (text, remedy)


WITHOUT_EFFECT = (Cause.NO_FORMAT, Cause.NOT_LISTED)  # of actions: then nothing is known of states
FAULTS = (Cause.DIFFERENT_STARTS, Cause.CONTEXT_OVERFLOW, Cause.SINGLE_STATE, Cause.NO_REWARD)  # of an environment


class Finding(NamedTuple):
    """Why a run had nothing to learn from: what was seen, without a full stop, and what to do; as text, both."""

    cause: Cause
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.seen}. {self.remedy}"


def verdict(tally: Tally, estimator: str = "g2po") -> Finding | None:
    """Return why a run had nothing to learn from and what to do next, or `None`."""
    if not tally["episodes"]:
        return None
    row = row_of(estimator)
    compares = row.compares if row else None  # `None`: an own estimator, or a critic, may learn from equal rewards
    causes = [Cause.ERRORS, Cause.CUT_OFF, *FAULTS[:3]]
    if not tally["unequal_groups"]:
        of_model = [Cause.NO_FORMAT, Cause.NO_CALL, Cause.NOT_LISTED]
        causes += [] if tally["successes"] else [*of_model, Cause.ENDED_EARLY, Cause.NO_REWARD, Cause.NOT_ENDED]
        causes += [Cause.EQUAL_REWARDS] if compares or tally["successes"] in (0, tally["counted"]) else []
    elif compares == "steps" and not estimator.startswith(_EPISODES_ALONE):
        causes.append(Cause.NEVER_COMPARED)
    found = (cause for cause in causes if cause.holds(tally))
    facts = {**tally, "reason": tally.reason}
    return next((Finding(cause, cause.wording[0].format(**facts), cause.wording[1]) for cause in found), None)


def verdict_of(groups: Sequence, described: Mapping[str, Any], replaced: Sequence = ()) -> Finding | None:
    """Return the verdict on recorded groups, by run.json (`described`); `None` for a log, which trained nothing."""
    if "traces" in described:
        return None
    return verdict(Tally.of(groups, replaced), described.get("estimator", {}).get("estimator_name", "g2po"))
