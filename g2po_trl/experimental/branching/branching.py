"""Branching: some episodes of each group begin where others were, as soon as those have ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import index
from typing import Any

from ...credit.estimators.registry import ESTIMATORS, compares_steps
from ...credit.graph import StateGraph
from ...rollout.episode import NOT_REPLAYED, Branch, Episode
from ...rollout.strategy import Rollout, RolloutContext, Row, SynchronousRollout
from ...trajectory import Trajectory
from .rules import RULES

logger = logging.getLogger(__name__)


class BranchingRollout(SynchronousRollout):
    """Holds back some episodes of each group until its first ones have ended, and then continues these.

    Held-back episodes that the rule does not use begin with their task, as the first ones do. A branch begins with its
    parent's actions, so environments must lead to the same states when the same actions are played again.

    Args:
        context: the parts of the run.
        branch_share: fraction of a group's episodes that are held back.
        rule: name of the rule in `RULES` that chooses the states to continue from.
    """

    def __init__(self, context: RolloutContext, *, branch_share: float = 0.5, rule: str = "least_visited"):
        super().__init__(context)
        context.check_whole_groups("branching")
        self.rule = RULES[rule]
        self.held_back = round(branch_share * context.group_size)
        self.no_return: set[str] = set()  # ids of tasks that are not branched any more

    @property
    def counted_per_group(self) -> int:
        """Episodes of each group that always begin with its task: the same number of each task."""
        return self.context.group_size - self.held_back

    @classmethod
    def check(cls, args: Any, branch_share: float = 0.5, rule: str = "least_visited") -> None:
        if not 0 < branch_share < 1:
            raise ValueError(
                f"branch_share (rollout_strategy_kwargs) is {branch_share!r}: set it above 0 and below 1, or use "
                "rollout_strategy='synchronous'"
            )
        size, number = args.num_generations, round(branch_share * args.num_generations)
        if not 1 <= number <= size - 2:
            raise ValueError(
                f"branch_share (rollout_strategy_kwargs) is {branch_share!r}: of num_generations={size} episodes it "
                f"may make {number} branches; that must be at least 1, and leave at least 2"
            )
        if rule not in RULES:
            raise ValueError(f"rule (rollout_strategy_kwargs) is {rule!r}: choose one of {', '.join(RULES)}")
        name, kwargs, weight = args.advantage_estimator, args.estimator_kwargs, args.step_advantage_weight
        if name not in ESTIMATORS or not compares_steps(name, kwargs, weight):
            raise ValueError(
                f"rollout_strategy is 'branching', and advantage_estimator={name!r} with estimator_kwargs={kwargs} "
                f"and step_advantage_weight={weight} compares whole episodes only, and a branch is none: use another "
                "strategy"
            )

    def collect(self, rows: Sequence[Row], groups: Sequence[int], iteration: int) -> Rollout:
        trajectories, stats = self.context.play(rows, groups, BranchSchedule(self))
        ((_, number),) = stats.parts
        stats.parts = ((self._turns(trajectories), number),)
        return Rollout(trajectories, stats)

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        branches = [played for played in rollout.trajectories if played.parent is not None]
        return {
            "rollout/branches": len(branches),
            "rollout/branch_errors": sum(not played.counted for played in branches),
            "rollout/replayed_steps": rollout.stats.replayed_steps,
        }

    def state_dict(self) -> list[str]:
        return sorted(set(self.context.gather(sorted(self.no_return))))

    def load_state_dict(self, state: Sequence[str]) -> None:
        self.no_return |= set(state)

    def branches(self, first: Sequence[Trajectory]) -> list[Branch]:
        """Return the branches of a group, whose first episodes have ended, at states that can be branched from."""
        found = []
        for place, position in self._chosen(first):
            steps = first[place].steps if 0 <= place < len(first) and first[place].counted else ()
            if not 0 < position < len(steps) or len(found) == self.held_back:
                raise ValueError(
                    f"the branching rule returned trajectory {place}, position {position}: name trajectories with a "
                    f"result, positions after the first step and before the end, and at most {self.held_back} of a "
                    "group"
                )
            found.append(Branch(place, steps[: position + 1], self.context.has_own_keys))
        return [] if first[0].task_id in self.no_return else found

    def record_failures(self, group: Sequence[Trajectory]) -> None:
        """Stop branching a task whose environment did not lead to the same states again."""
        for trajectory in group:
            if (trajectory.error or "").startswith(NOT_REPLAYED):
                if not self.no_return:
                    logger.warning(
                        "task %s is not branched again, and neither are other tasks with this error "
                        "(rollout/branch_errors; `g2po check` may find the cause): %s",
                        trajectory.task_id,
                        trajectory.error,
                    )
                self.no_return.add(trajectory.task_id)

    def _turns(self, trajectories: Sequence[Trajectory]) -> int:
        """Return the turns of the longest group, whose held-back episodes begin when its first ones have ended."""
        size, first = self.context.group_size, self.counted_per_group
        lengths = [len(trajectory.steps) for trajectory in trajectories]
        groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        return max((max(group[:first]) + max(group[first:]) for group in groups), default=0)

    def _chosen(self, first: Sequence[Trajectory]) -> list[tuple[int, int]]:
        """Return the rule's choice as plain integers, since numpy's cannot be written to files."""
        graph: StateGraph = self.context.graph_of([first])
        chosen = self.rule(graph, self.held_back)
        try:
            return [(index(place), index(position)) for place, position in chosen]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the branching rule returned {str(chosen)[:200]} ({error}): return pairs of whole numbers, "
                "(trajectory, position)"
            ) from error


class BranchSchedule:
    """Begins the first episodes of each group at once, and its held-back ones when the first have ended."""

    def __init__(self, strategy: BranchingRollout):
        self.strategy = strategy
        self._may_begin: list[Episode] = []

    def first(self, episodes: Sequence[Episode]) -> list[Episode]:
        size = self.strategy.context.group_size
        self._groups = [episodes[i : i + size] for i in range(0, len(episodes), size)]
        self._group_of = {e.number: group for group, members in enumerate(self._groups) for e in members}
        self._left = [size] * len(self._groups)
        return [e for members in self._groups for e in members[: self.strategy.counted_per_group]]

    def more(self) -> list[Episode]:
        begun, self._may_begin = self._may_begin, []
        return begun

    def ended(self, episode: Episode) -> None:
        group = self._group_of[episode.number]
        members, first = self._groups[group], self.strategy.counted_per_group
        self._left[group] -= 1
        if self._left[group] == 0:
            self.strategy.record_failures([member.trajectory() for member in members])
        elif self._left[group] == len(members) - first:
            branches = self.strategy.branches([member.trajectory() for member in members[:first]])
            for member, branch in zip(members[first:], branches):
                member.branch = branch
                if (transcript := members[branch.parent].transcript) is not None:  # a conversation goes on
                    played = [(step.prompt_ids, step.completion_ids) for step in branch.steps[:-1]]
                    member.transcript = transcript.first(played)
            self._may_begin += members[first:]
