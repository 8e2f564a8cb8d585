"""Tasks whose episodes all end in environment errors: counted, excluded, and reported at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class TaskErrors:
    """Counts consecutive rollouts in which each episode of a task was an error; after `patience` it is excluded."""

    def __init__(self, patience: int):
        self.patience = patience
        self.in_a_row: dict[str, int] = {}

    @property
    def excluded(self) -> list[str]:
        """Ids of excluded tasks, sorted."""
        return sorted(task for task, count in self.in_a_row.items() if count >= self.patience)

    def __contains__(self, task_id: str) -> bool:
        return self.in_a_row.get(task_id, 0) >= self.patience

    def count(self, records: Iterable[Any]) -> None:
        """Count a rollout, given `task_id` and `outcome` of all ranks' trajectories."""
        outcomes: dict[str, set[str]] = {}
        for record in records:
            outcomes.setdefault(record.task_id, set()).add(record.outcome)
        for task, found in outcomes.items():
            if task in self:
                continue
            if found - {"error", "lost"}:
                self.in_a_row.pop(task, None)
            elif found == {"error"}:  # an episode that was lost with its worker is no evidence about the task
                self.in_a_row[task] = self.in_a_row.get(task, 0) + 1

    def state_dict(self) -> dict[str, int]:
        """Return the counts, as plain data."""
        return self.in_a_row

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the counts of `state_dict`."""
        self.in_a_row.update(state)
