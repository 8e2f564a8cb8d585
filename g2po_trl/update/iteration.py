"""One rollout and the training steps on it: how far it has come, and what is logged at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .update import MicroBatches


class Iteration:
    """Where training stands.

    Args:
        num_slices: parts of a rollout; a training step trains one of them.
        num_passes: how often a rollout is gone through.
        metrics: name -> values that will be logged as their mean, and then removed. TRL's own dictionary.

    `step` counts training steps from the beginning of the run, `slices` are the rollout's micro-batches.
    """

    def __init__(self, num_slices: int, num_passes: int, metrics: dict[str, list[float]]):
        self.num_slices, self.length = num_slices, num_slices * num_passes
        self.metrics = metrics
        self.step = 0
        self.slices: MicroBatches = []
        self.update_time = 0.0
        self._merging: tuple[dict[str, int], list[int]] | None = None

    @property
    def number(self) -> int:
        """Of the iteration that `step` belongs to, from 1."""
        return self.step // self.length + 1

    @property
    def is_complete(self) -> bool:
        """The last training step was the rollout's last; true before the first rollout, too."""
        return self.step % self.length == 0

    @property
    def needs_rollout(self) -> bool:
        """There is nothing left to train on."""
        return self.is_complete or not self.slices

    @property
    def slice(self) -> list[dict[str, Any]]:
        """The micro-batches of the training step at hand."""
        return self.slices[self.step % self.num_slices]

    def start_anew(self) -> None:
        """Training begins with a rollout, whatever an earlier one has left."""
        self.step += -self.step % self.length
        self.slices, self._merging = [], None

    def advance(self, seconds: float) -> None:
        """A training step was made in so many seconds."""
        self.step += 1
        self.update_time += seconds
        if self.is_complete:
            self.log({"time/update": self.update_time})
            self.update_time = 0.0

    def log(self, values: Mapping[str, float]) -> None:
        """To be logged with the iteration."""
        for name, value in values.items():
            self.metrics.setdefault(name, []).append(float(value))

    @contextmanager
    def one_value_each(self) -> Iterator[None]:
        """Around a slice's losses: metrics get one value a slice, whatever number of micro-batches it was cut into.

        After `begin_with`, one for all slices.
        """
        marks, tokens = self._merging or (self._marks(), [])
        yield
        tokens = tokens + [micro_batch["weight"] for micro_batch in self.slice]
        if self._merging is None or (self.step + 1) % self.length == 0:
            merge_micro_batch_metrics(self.metrics, marks, tokens)
            self._merging = None
        else:
            self._merging = marks, tokens

    def begin_with(self, values: Mapping[str, float], tokens: int) -> None:
        """What the loss has logged, on so many tokens, before the first slice of this rollout."""
        if tokens:
            self._merging = self._marks(), [tokens]
            self.log(values)

    @contextmanager
    def logged_aside(self) -> Iterator[dict[str, float]]:
        """What the loss logs in here comes as a dictionary, and is not logged with the iteration."""
        marks, logged = self._marks(), {}
        yield logged
        for name, values in list(self.metrics.items()):
            mark = marks.get(name, 0)
            if len(values) > mark:
                logged[name] = values[-1]
                del values[mark:]
            if not values:
                del self.metrics[name]

    def _marks(self) -> dict[str, int]:
        return {name: len(values) for name, values in self.metrics.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the place, and what was not logged yet. Plain data."""
        return {"step": self.step, "update_time": self.update_time, "metrics": dict(self.metrics)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.step, self.update_time = state["step"], state["update_time"]
        for name, values in state["metrics"].items():  # JSON has no NaN
            self.metrics[name] = [math.nan if value is None else value for value in values]


def merge_micro_batch_metrics(metrics: dict[str, list[float]], marks: dict[str, int], tokens: list[int]) -> None:
    """One value a slice for what the loss logged once a micro-batch, so that metrics do not depend on the cut either.

    Means are weighted by reply tokens; `…_min` and `…_max` keep their meaning. A slice without any has no value: the
    loss logs zeros for it, and an entropy of 0 would read as a policy that has collapsed.
    """
    for name, values in list(metrics.items()):
        mark = marks.get(name, 0)
        new = values[mark:]
        if len(new) != len(tokens):
            continue
        if not sum(tokens):
            del values[mark:]
            if not values:
                del metrics[name]
            continue
        values[mark:] = [merge(name, new, tokens)]


def merge(name: str, values: Sequence[float], tokens: Sequence[int]) -> float:
    """One value of a metric for those of parts with so many tokens."""
    pairs = [(value, weight) for value, weight in zip(values, tokens, strict=True) if not math.isnan(value)]
    if not pairs:
        return math.nan
    if name.endswith(("_min", "_max")):
        return (min if name.endswith("_min") else max)(value for value, _ in pairs)
    return sum(value * weight for value, weight in pairs) / max(1, sum(weight for _, weight in pairs))


class Clock:
    """Seconds of one thing after the other."""

    def __init__(self):
        self.laps: dict[str, float] = {}
        self._started = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the lap before is called so."""
        now = time.perf_counter()
        self.laps[name], self._started = now - self._started, now
