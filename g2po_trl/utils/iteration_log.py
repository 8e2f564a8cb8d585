"""Iterations in log lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def iterations_of(log: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the iterations in log lines: a rollout's metrics, with the time of its update.

    With `logging_steps` below the optimizer steps of an iteration, its rollout is in one log line and `time/update` in
    a later one, which may hold the next rollout already.
    """
    iterations: list[dict[str, Any]] = []
    for line in log:
        rest = dict(line)
        if iterations and "time/update" not in iterations[-1] and rest.get("time/update") is not None:
            iterations[-1]["time/update"] = rest.pop("time/update")
        if "episode/success_rate" in line:
            iterations.append(rest)
    return iterations
