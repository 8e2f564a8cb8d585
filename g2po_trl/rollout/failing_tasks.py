"""Tasks that cannot be played: found, set aside, named at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from transformers import TrainerCallback


class PlayedTask(Protocol):
    """An episode's task and outcome, as a `Trajectory` and the record of one have them."""

    task_id: str
    outcome: str
    parent: int | None


class TaskErrors:
    """Counts the rollouts in a row in which every episode of a task ended in an environment error.

    Args:
        patience: after so many a task is set aside: it is not played again, its trajectories are errors at once.
    """

    def __init__(self, patience: int):
        self.patience = patience
        self.in_a_row: dict[str, int] = {}

    @property
    def set_aside(self) -> list[str]:
        """Ids of these tasks, sorted."""
        return sorted(task for task, count in self.in_a_row.items() if count >= self.patience)

    def __contains__(self, task_id: str) -> bool:
        return self.in_a_row.get(task_id, 0) >= self.patience

    def count(self, records: Iterable[PlayedTask]) -> None:
        """Take note of a rollout, all ranks' trajectories."""
        failed: dict[str, bool] = {}
        not_known = set()
        for record in records:
            if record.parent is not None:  # that a state cannot be returned to is another thing
                continue
            if record.outcome == "lost":  # says nothing about its task
                not_known.add(record.task_id)
                continue
            failed[record.task_id] = failed.get(record.task_id, True) and record.outcome == "error"
        for task, all_failed in failed.items():
            if task in self:
                continue
            if not all_failed:
                self.in_a_row.pop(task, None)
            elif task not in not_known:
                self.in_a_row[task] = self.in_a_row.get(task, 0) + 1

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps. Plain data."""
        return self.in_a_row

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.in_a_row.update(state)


class TaskErrorReport(TrainerCallback):
    """Names the tasks that were set aside, when training has ended."""

    def __init__(self, errors: TaskErrors):
        self.errors = errors

    def on_train_end(self, args, state, control, **kwargs: Any):
        names = self.errors.set_aside
        if names and state.is_world_process_zero:
            print(
                f"{len(names)} task(s) were set aside after {self.errors.patience} rollouts of nothing but "
                f"environment errors: {', '.join(names)}. Why is in their trajectories (`error`).",
                flush=True,
            )
