"""Progress of an iteration, a rollout and the training steps on it, and its metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .update import MiniBatches


class Iteration:
    """Progress of training, in iterations.

    Args:
        steps_per_pass, num_passes: training steps of one pass over a rollout, and passes.
        metrics: TRL's dictionary of values by name, which are logged as their mean and then removed.

    `step` counts training steps from the beginning of the run, and `inner_steps` the optimizer steps within them.
    `grad_norms` are those of the training step's optimizer steps so far.
    """

    def __init__(self, steps_per_pass: int, num_passes: int, metrics: dict[str, list[float]]):
        self.steps_per_pass, self.length, self.metrics = steps_per_pass, steps_per_pass * num_passes, metrics
        self.step, self.inner_steps, self.update_time = 0, 0, 0.0
        self.mini_batches: MiniBatches = []
        self.grad_norms: list[float] = []
        self._tokens: dict[str, list[int]] = {}  # of each value of a metric that is a mean over tokens

    @property
    def number(self) -> int:
        """Number of the iteration that `step` belongs to, from 1."""
        return self.step // self.length + 1

    @property
    def is_complete(self) -> bool:
        """True if the last training step was the rollout's last, and before the first rollout."""
        return self.step % self.length == 0

    @property
    def current_mini_batches(self) -> MiniBatches:
        """[mini-batch][micro-batch] of the current training step; between mini-batches an optimizer step is made."""
        return self.mini_batches if self.steps_per_pass == 1 else [self.mini_batches[self.step % self.steps_per_pass]]

    def reset(self) -> None:
        """Begin with a new rollout and an empty log, regardless of earlier calls of `train`."""
        self.step += -self.step % self.length
        self.mini_batches, self.grad_norms, self.update_time = [], [], 0.0
        self.metrics.clear()
        self._tokens.clear()

    def advance(self, seconds: float) -> None:
        """Count a training step that took `seconds`."""
        self.step += 1
        self.update_time += seconds
        if self.is_complete:
            self.log({"time/update": self.update_time})
            self.update_time = 0.0

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the iteration's metrics."""
        for name, value in values.items():
            self.metrics.setdefault(name, []).append(float(value))

    @contextmanager
    def merged_metrics(self) -> Iterator[None]:
        """Merge values that losses log inside, one a micro-batch, so that they do not depend on the micro-batches.

        Without any token there is no value: the loss logs zeros, as if the policy had collapsed.
        """
        marks = {name: len(values) for name, values in self.metrics.items()}
        yield
        tokens = [micro_batch["weight"] for mini_batch in self.current_mini_batches for micro_batch in mini_batch]
        for name, values in list(self.metrics.items()):
            before, new = values[: marks.get(name, 0)], values[marks.get(name, 0) :]
            if len(new) != len(tokens):
                continue
            if sum(tokens):
                values[:] = [*before, merge(name, new, tokens)]
                self._tokens.setdefault(name, []).append(sum(tokens))
            elif before:
                values[:] = before
            else:
                del self.metrics[name]

    def merge_training_steps(self) -> None:
        """Weigh training steps by their tokens in means over tokens. Called before metrics are logged."""
        for name, tokens in self._tokens.items():
            values = self.metrics.get(name, [])
            if len(values) == len(tokens) > 1:
                values[:] = [merge(name, values, tokens)]
        self._tokens.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and the metrics not yet logged, as plain data for a checkpoint."""
        progress = {name: getattr(self, name) for name in ("step", "inner_steps", "update_time")}
        return {**progress, "metrics": dict(self.metrics), "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.inner_steps, self.update_time = state["step"], state["inner_steps"], state["update_time"]
        self._tokens = dict(state["tokens"])
        for name, values in state["metrics"].items():  # JSON has no NaN
            self.metrics[name] = [math.nan if value is None else value for value in values]


def merge(name: str, values: Sequence[float], tokens: Sequence[int]) -> float:
    """Return a metric's value from its values on parts with these numbers of tokens: their mean, least or largest."""
    pairs = [(value, weight) for value, weight in zip(values, tokens, strict=True) if not math.isnan(value)]
    if not pairs:
        return math.nan
    if name.endswith(("_min", "_max")):
        return (min if name.endswith("_min") else max)(value for value, _ in pairs)
    return sum(value * weight for value, weight in pairs) / max(1, sum(weight for _, weight in pairs))


class Timer:
    """Seconds of consecutive parts of the work."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def record(self, name: str) -> None:
        """Record the time since the last call under this name."""
        now = time.perf_counter()
        self.seconds[name], self._started = now - self._started, now
