"""The verdict of a run that had nothing to learn from, with a remedy.

A `Tally` counts over all rollouts of a run. A checkpoint keeps it, so that the verdict covers the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..credit.estimators.registry import estimator_name, row_of
from ..credit.graph import TrajectoryRecord
from ..trajectory import Trajectory
from .diagnosis import Evidence, Fault

ALMOST_NONE, NEARLY_ALL = 0.01, 0.9  # of completions or actions
_EPISODES_ALONE = estimator_name("g2po", {"node_centric": False, "edge_centric": False})


@dataclass
class Tally(Evidence):
    """Counts over the rollouts of a run, of all processes.

    Args:
        unequal_groups: number of trained groups with unequal rewards.
        completions, valid, cut: number of completions, of those with the required format, and of those that reached
            `max_completion_length`, if it is not that of short actions.
        listed, admissible: number of steps for which actions were listed, and of those with an action among them.
        offered, called: number of completions whose prompt offered tools, and of those that called one.
        later_steps, shared_steps: number of steps after the first of an episode, and of those in a state that was
            visited more than once in its group.
    """

    unequal_groups: int = 0
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
        trajectories: Iterable[Trajectory],
        replaced: Iterable[TrajectoryRecord] = (),
    ) -> None:
        """Count a rollout: the groups that are trained on, all trajectories, and records of `replaced` groups."""
        self.add_episodes(replaced)
        for group in groups:
            self.add_group(group)
            counted = [one for one in group if one.counted]
            self.unequal_groups += len({one.reward for one in counted}) > 1
            visits = Counter(key for one in counted for key in one.keys)
            later = [key for one in counted for key in one.keys[1:]]
            self.later_steps += len(later)
            self.shared_steps += sum(visits[key] > 1 for key in later)
        for step in (step for played in trajectories if played.counted for step in played.steps):
            self.completions += 1
            self.valid += step.valid
            self.cut += step.completion_truncated
            self.listed += step.admissible is not None
            self.admissible += bool(step.admissible)
            self.offered += step.call is not None
            self.called += step.call not in (None, "none")

    def restart(self) -> None:
        """Reset all counts: training starts again."""
        self.__init__()

    def state_dict(self) -> dict[str, int]:
        """Return the counts as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counts that `state_dict` returned."""
        self.__init__(**state)


def verdict(tally: Tally, estimator: str = "g2po", penalty: float = 0.0) -> str | None:
    """Return why a run had nothing to learn from and what to do next, in a paragraph, or `None`.

    `penalty`: `invalid_action_penalty`, by which completions of equal rewards differ.
    """
    if not tally.episodes:
        return None
    if tally.errors == tally.episodes:
        return (
            f"Nothing was learned: {_all(tally.episodes, 'episode')} ended in an environment error. The field "
            "`error` in trajectories/ has the reasons; `g2po check` plays the environment without a model."
        )
    if (text := cut_off(tally)) is not None:
        return text
    faults = tally.faults()
    if faults and faults[0] is not Fault.NO_REWARD:
        return "{}. {}".format(*tally.describe(faults[0]))
    row = row_of(estimator)
    compares = row.compares if row else None  # an own estimator, or a critic
    if tally.unequal_groups:
        is_compared = compares == "steps" and not estimator.startswith(_EPISODES_ALONE)
        if not is_compared or not tally.later_steps or tally.shared_steps:
            return None
        return (
            f"No action was compared with another in the same state: after an episode's first step, "
            f"{_all(tally.later_steps, 'step')} were in a state that was visited once in its group. Use coarser state "
            "keys (state_key, state_key_ignores); `g2po view` shows how states differ."
        )
    groups = _all(tally.groups, "group")
    if not tally.successes:
        has_format = penalty and 0 < tally.valid < tally.completions
        what = "Nothing but the format (invalid_action_penalty)" if has_format else "Nothing"
        return f"{what} to learn from: {groups} failed in every episode, with equal rewards. {_remedy(tally)}"
    if tally.successes == tally.episodes - tally.errors:
        return f"Success could not rise: {groups} succeeded in every episode, with equal rewards. Use harder tasks."
    if compares is None:  # it may learn from equal rewards of a group
        return None
    return (
        f"Nothing to compare: in {groups} rewards were equal ({tally.successes:,} of {tally.episodes:,} episodes "
        "succeeded). Use tasks that the model solves sometimes, or larger groups (num_generations)."
    )


def cut_off(tally: Tally) -> str | None:
    """Return a sentence and a remedy if nearly all completions were cut off."""
    if tally.cut <= NEARLY_ALL * tally.completions:
        return None
    return (
        f"Completions do not end: {tally.cut:,} of {tally.completions:,} reached max_completion_length, so what "
        "follows an answer is trained like the answer. Raise max_completion_length, or let completions end earlier "
        "(stop_sequences, the tokenizer's eos_token)."
        + (f" {_none(tally.called, tally.offered, 'completion')} called a tool." if _calls_none(tally) else "")
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
