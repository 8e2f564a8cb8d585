"""Progress for the user: bars during a rollout, and readable lines per iteration."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ..rollout.failing_tasks import TaskErrors
from ..utils.json import to_json, write_json_lines
from ..utils.show import printable
from .metrics import METRICS
from .output_dir import RunFolder
from .verdict import Cause, Tally, verdict

EARLY_VERDICT, PATIENCE = 5, 5  # iterations, and log lines without the format
AT_ONCE = (Cause.CUT_OFF, Cause.DIFFERENT_STARTS)  # are told after the first iteration


class IterationProgressCallback(TrainerCallback):
    """Prints two lines per iteration and one per evaluation, in place of a dictionary of forty numbers."""

    def __init__(self, steps_per_iteration: int, clock: Callable[[], float] = time.perf_counter):
        self.steps_per_iteration, self.clock = steps_per_iteration, clock
        self.started = clock()
        self._first: tuple[float, int] | None = None  # time and step at which this process began to train

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self._first = self.clock(), None

    def on_step_begin(self, args, state, control, **kwargs):
        self._first = self._first or (self.clock(), state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "episode/success_rate" not in (logs or ()):
            return
        step, last = state.global_step, state.max_steps
        iteration, total = (-(-number // self.steps_per_iteration) for number in (step, last))
        parts = [f"iteration {iteration:>3}/{total}", *_episodes(logs, "episode/")]
        parts += [f"kl {logs['kl']:.4f}"] if logs.get("kl") is not None else []
        seconds = f"rollout {logs['time/rollout']:.1f} s"
        if "time/update" in logs:
            seconds += f", update {logs['time/update'] + logs.get('time/logps', 0.0):.1f} s"
        elapsed = f"elapsed {tqdm.format_interval(self.clock() - self.started)}"
        began, first = self._first or (0.0, step)
        if first < step < last:
            mean = (self.clock() - began) / (step - first)  # of a step, evaluations included
            elapsed += f", {tqdm.format_interval((last - step) * mean)} left"
        print_line(f"{' | '.join(parts)}\n    {seconds} | {elapsed}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        for name in metrics or {} if state.is_world_process_zero else ():
            if name.endswith("_success_rate"):
                prefix = name.removesuffix("success_rate")
                ends = [f"{metrics[f'{prefix}episodes']:.0f} episodes", f"{metrics[f'{prefix}runtime']:.0f} s"]
                head = f"{prefix.removesuffix('_')} at step {state.global_step}"
                print_line(" | ".join([head, *_episodes(metrics, prefix), *ends]))


class LogFile(TrainerCallback):
    """Writes each log entry to log.jsonl at once; a resumed run replaces those after its checkpoint."""

    def __init__(self, folder: RunFolder):
        self.folder, self._writes = folder, False
        self.path = folder.path / "log.jsonl"

    def on_train_begin(self, args, state, control, **kwargs):
        self._writes = state.is_world_process_zero
        if self._writes:
            write_json_lines(self.path, state.log_history)

    def on_log(self, args, state, control, **kwargs):
        if self._writes and self.folder.is_ours:  # after training it may be another run's
            with self.path.open("a", encoding="utf-8") as file:
                file.write(to_json(state.log_history[-1]) + "\n")


class OwnSchedule(TrainerCallback):
    """Gives a resumed run the learning rate of its own schedule, which may be longer than the checkpoint's."""

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        if isinstance(lr_scheduler, LambdaLR):
            groups, rates = lr_scheduler.optimizer.param_groups, lr_scheduler.base_lrs
            for group, rate, factor in zip(groups, rates, lr_scheduler.lr_lambdas, strict=True):
                group["lr"] = rate * factor(lr_scheduler.last_epoch)
            lr_scheduler._last_lr = [group["lr"] for group in groups]


class CollapseStoppingCallback(TrainerCallback):
    """Ends a run whose completions lose the format, see `G2POConfig.min_valid_action_ratio`.

    The mean is read from the log that a checkpoint keeps: a resumed run is stopped where an uninterrupted one is.
    """

    def __init__(self, min_valid_action_ratio: float):
        self.min_valid_action_ratio = min_valid_action_ratio

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "episode/success_rate" not in (logs or ()) or control.should_training_stop:
            return
        logged = (entry.get("episode/valid_action_ratio") for entry in state.log_history)
        valid = list(filter(_is_measured, logged))[-PATIENCE:]
        if len(valid) < PATIENCE or (mean := sum(valid) / PATIENCE) >= self.min_valid_action_ratio:
            return
        control.should_training_stop, control.should_save = True, args.save_strategy != "no"
        if state.is_world_process_zero:
            least = f"less than min_valid_action_ratio={self.min_valid_action_ratio}"
            print_line(f"Stopping at step {state.global_step}: {mean:.1%} of completions had the format, {least}.")


class ClosingVerdict(TrainerCallback):
    """Prints the verdict of a run once early, and with excluded tasks at the end unless its caller `waits`."""

    def __init__(self, tally: Tally, estimator_name: str, task_errors: TaskErrors):
        self.tally, self.estimator_name, self.task_errors = tally, estimator_name, task_errors
        self.waits = self._warned = False

    @property
    def text(self) -> str | None:
        """The verdict on what was played so far."""
        return (finding := verdict(self.tally, self.estimator_name)) and str(finding)

    def on_log(self, args, state, control, logs=None, **kwargs):
        played = state.global_step // args.optimizer_steps_per_iteration
        is_early = played < EARLY_VERDICT and not any(cause.holds(self.tally) for cause in AT_ONCE)
        if self._warned or is_early or state.global_step >= state.max_steps:
            return
        self._warned = True
        if state.is_world_process_zero and (text := self.text):
            print_line(f"After {max(1, played)} iterations: {text}")

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        if names := self.task_errors.excluded:
            why = f"after {self.task_errors.patience} rollouts with only environment errors"
            print_line(f"{len(names)} task(s) were excluded {why} (`error` in trajectories): {', '.join(names)}.")
        if not self.waits and (text := self.text):
            print_line(text)


@contextmanager
def rollout_bar(description: str, total: int, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of turns and running episodes that shows them in a bar, if stderr is a terminal."""
    with tqdm(total=total, desc=description, unit="turn", leave=False, disable=None if enabled else True) as bar:

        def show(done: int, live: int) -> None:
            bar.set_postfix_str(f"{live} episodes running")
            bar.update(done - bar.n)

        yield show


def print_line(text: str) -> None:
    """Print without tearing a progress bar."""
    tqdm.write(printable(text), file=sys.stdout)
    sys.stdout.flush()


def _episodes(metrics: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the means of episodes, as far as they were measured, for a line."""
    for metric in (metric for metric in METRICS if metric.short):
        value = metrics.get(f"{prefix}{metric.name}")
        if _is_measured(value):
            yield f"{metric.short} {f'{value:5.1%}' if metric.scale == 100 else f'{value:.2f}'}"
        elif not metric.optional:
            yield f"{metric.short} n/a"


def _is_measured(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
