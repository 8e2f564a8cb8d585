"""What a user watches: progress bars of a rollout, and one readable line an iteration."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from .iteration_log import IterationLog

if TYPE_CHECKING:
    from ..config import G2POConfig


def callbacks_of(args: G2POConfig) -> list[TrainerCallback]:
    """Those that the configuration asks for."""
    found: list[TrainerCallback] = []
    if not args.disable_tqdm:
        found.append(IterationLine(args.optimizer_steps_per_iteration))
    if args.min_valid_action_ratio or args.min_success_of_best:
        found.append(CollapseStop(args.min_valid_action_ratio, args.min_success_of_best, args.collapse_patience))
    return found


class IterationLine(TrainerCallback):
    """Prints one line an iteration and one an evaluation, in place of a dictionary of forty numbers."""

    def __init__(self, steps_per_iteration: int):
        self.steps_per_iteration = steps_per_iteration
        self.started = time.perf_counter()
        self.log = IterationLog()

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            for entry in self.log.add({**logs, "step": state.global_step}):
                self._print(entry, state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        for entry in self.log.close():
            self._print(entry, state.max_steps)

    def _print(self, entry: Mapping[str, Any], max_steps: int) -> None:
        iteration = -(-entry["step"] // self.steps_per_iteration)
        total = -(-max_steps // self.steps_per_iteration)
        phases = [(name, entry.get(f"time/{name}")) for name in ("rollout", "logps", "update")]
        print_line(
            f"iteration {iteration:>3}/{total} | success {_percent(entry.get('episode/success_rate'))} | "
            f"{_score(entry.get('episode/score'))}"
            f"reward {_number(entry.get('episode/reward'))} | turns {_number(entry.get('episode/turns'))} | "
            f"valid {_percent(entry.get('episode/valid_action_ratio'))} | kl {entry.get('kl') or 0.0:.4f} | "
            f"seconds: {' '.join(f'{name} {value:.1f}' for name, value in phases if value is not None)} | "
            f"elapsed {time.perf_counter() - self.started:.0f} s"
        )

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        for name in metrics or {} if state.is_world_process_zero else ():
            if name.endswith("_success_rate"):
                prefix = name.removesuffix("_success_rate")
                turns, valid, episodes, seconds = (
                    metrics[f"{prefix}_{part}"] for part in ("turns", "valid_action_ratio", "episodes", "runtime")
                )
                print_line(
                    f"{prefix} at step {state.global_step} | success {_percent(metrics[name])} | "
                    f"{_score(metrics.get(f'{prefix}_score'))}"
                    f"turns {_number(turns)} | valid {_percent(valid)} | {episodes:.0f} episodes | {seconds:.0f} s"
                )


class CollapseStop(TrainerCallback):
    """Ends a run whose agent has come apart: replies without the format, or success far below what it was.

    Both are means over `patience` log lines. All is read from the log that a checkpoint keeps, so a resumed run judges
    as an uninterrupted one. See `G2POConfig.min_valid_action_ratio` and `min_success_of_best`.
    """

    def __init__(self, min_valid_action_ratio: float, min_success_of_best: float, patience: int):
        self.min_valid_action_ratio, self.min_success_of_best = min_valid_action_ratio, min_success_of_best
        self.patience = patience

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "episode/success_rate" not in logs:
            return
        valid = self._means(state.log_history, "episode/valid_action_ratio")
        success = self._means(state.log_history, "episode/success_rate")
        reason = None
        if valid and valid[-1] < self.min_valid_action_ratio:
            reason = (
                f"{_percent(valid[-1])} of the replies had the required format, less than "
                f"min_valid_action_ratio={self.min_valid_action_ratio}"
            )
        elif success and success[-1] < self.min_success_of_best * max(success):
            reason = (
                f"success fell to {_percent(success[-1])} from {_percent(max(success))}, below "
                f"min_success_of_best={self.min_success_of_best}"
            )
        if reason and not control.should_training_stop:
            control.should_training_stop = True
            control.should_save = args is None or args.save_strategy != "no"
            if state.is_world_process_zero:
                print_line(f"Stopping at step {state.global_step}: {reason} (over {self.patience} log lines).")

    def _means(self, log_history: list[dict], name: str) -> list[float]:
        """Moving means of a metric, one for each place with `patience` values behind it."""
        values = [entry[name] for entry in log_history if entry.get(name) is not None]
        return [sum(values[i - self.patience : i]) / self.patience for i in range(self.patience, len(values) + 1)]


class RolloutBar:
    """A bar that shows how far a rollout is, in turns of its longest episode or in groups, and how many are live.

    Silent when stderr is no terminal.
    """

    def __init__(self, description: str, total: int, num_episodes: int, enabled: bool, unit: str = "turn"):
        hidden = not enabled or not sys.stderr.isatty()
        self.bar = tqdm(total=total, desc=description, unit=unit, leave=False, disable=hidden)
        self.num_episodes = num_episodes

    def __call__(self, done: int, live: int) -> None:
        self.bar.set_postfix_str(f"{live}/{self.num_episodes} episodes live")
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        self.bar.close()


def print_line(text: str) -> None:
    """Print without tearing a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def _score(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"score {_percent(value)} | "


def _percent(value: float | None) -> str:
    return "  n/a" if value is None or math.isnan(value) else f"{100 * value:4.1f}%"


def _number(value: float | None) -> str:
    return "  n/a" if value is None or math.isnan(value) else f"{value:5.2f}"
