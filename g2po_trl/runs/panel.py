"""Evaluations of a run: sets of tasks (panels), played on all ranks, and their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset

from ..engines.sampling import derived_seed
from ..trajectory import Trajectory
from ..utils.options import require
from .metrics import flat, has_metric, summarize
from .output_dir import RunFolder, check_panel_name
from .summary import at_temperature


def play_panel(
    play: Callable[[list[dict[str, Any]], list[int]], list[Trajectory]],
    rollout: Callable[[], AbstractContextManager[None]],
    rows: Sequence[dict[str, Any]],
    size: int,
    seed: int,
    accelerator: Accelerator,
) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """Play an evaluation set on all ranks, `size` episodes at a time on each; return all trajectories and rows.

    All ranks call it together and get the same result. `play` plays tasks with a seed for each, inside one `rollout`
    context. torch's random state is restored afterwards.
    """
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    local = list(rows[rank::num_ranks])
    seeds = [derived_seed(seed, number) for number in range(len(rows))][rank::num_ranks]
    chunks = math.ceil(math.ceil(len(rows) / num_ranks) / size)  # as many on every rank
    played: list[Trajectory] = []
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), rollout():
        torch.manual_seed(seed + rank)  # for engines that take no seeds
        for chunk in range(chunks):
            part = slice(chunk * size, (chunk + 1) * size)
            played += play(local[part], seeds[part])
    pairs = gather_object(list(zip(played, local)))
    return [trajectory for trajectory, _ in pairs], [row for _, row in pairs]


class PanelEvaluation:
    """Plays evaluation sets with the current policy of a run, and records the results.

    Args:
        args: an object with the fields of a `G2POConfig`.
        play: plays tasks with a sampling and seeds on this rank.
        rollout: the context for several calls of `play`.
        folder: records summaries and trajectories.
        accelerator: gathers them over ranks.
    """

    def __init__(
        self,
        args: Any,
        play: Callable[..., tuple[list[Trajectory], Any]],
        rollout: Callable[[], AbstractContextManager[None]],
        folder: RunFolder,
        accelerator: Accelerator,
    ):
        self.args, self.play, self.rollout = args, play, rollout
        self.folder, self.accelerator = folder, accelerator

    def play_all(
        self, dataset: Iterable[dict[str, Any]], temperature: float
    ) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """Return the trajectories of an evaluation set, of all ranks, and the row of each."""
        args, sampling = self.args, self.args.evaluation_sampling(temperature)

        def play(tasks: list[dict[str, Any]], seeds: list[int]) -> list[Trajectory]:
            return self.play(tasks, sampling, description="evaluation", seeds=seeds)[0]

        rows = [row for row in dataset for _ in range(args.num_generations_eval)]
        return play_panel(play, self.rollout, rows, args.per_device_eval_batch_size, args.eval_seed, self.accelerator)

    def __call__(self, dataset: Dataset, prefix: str, temperature: float, step: int) -> dict[str, float]:
        """Play an evaluation set on all ranks, and return its metrics, with a prefix."""
        started = time.perf_counter()
        trajectories, rows = self.play_all(dataset, temperature)
        summary = summarize(trajectories, [row.get("task_type") for row in rows])
        if self.accelerator.is_main_process:
            self.folder.add_evaluation(prefix, step, temperature, summary, trajectories, dataset)
        metrics = {f"{prefix}_{name}": value for name, value in flat(summary).items()}
        return metrics | {f"{prefix}_runtime": time.perf_counter() - started}


def panels_by_prefix(
    dataset: Dataset | Mapping[str, Dataset] | str | None, known: Dataset | Mapping[str, Dataset] | None, prefix: str
) -> dict[str, Dataset]:
    """Return the evaluation sets to play by the prefix of their metrics.

    Args:
        dataset: tasks, sets by name, or the name of one of the `known` sets. `None`: the known ones.
        known: the evaluation sets of the run.
        prefix: prefix of one without a name; a prefix that ends with the name of the set is complete.
    """
    if isinstance(dataset, str):
        names = list(known) if isinstance(known, Mapping) else []
        require(dataset in names, "eval_dataset", dataset, f"the trainer's named evaluation sets are {names}")
        dataset = {dataset: known[dataset]}
    named = known if dataset is None else dataset
    if isinstance(named, Mapping):
        named = {f"{prefix.removesuffix(f'_{name}')}_{name}": rows for name, rows in named.items()}
    else:
        named = {prefix: named}
    for name, rows in named.items():
        check_panel_name(name)
        require(rows is not None and len(rows) > 0, "eval_dataset", rows, "pass the tasks to evaluate on")
    return named


def check_evaluations(
    args: Any, eval_dataset: Dataset | Mapping[str, Dataset] | None, environments: Iterable[str], known_metrics: bool
) -> None:
    """Refuse names of evaluation sets that are no file names or clash, and a best metric that none reports.

    `known_metrics`: evaluations report `METRICS` alone. transformers would fail after the first evaluation.
    """
    panels = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    reported: dict[str, Any] = {}
    for name, rows in panels.items():
        if name:
            check_panel_name(name, "eval_dataset")
        prefix = f"eval_{name}" if name else "eval"
        for taken in (prefix, *(at_temperature(prefix, other) for other in args.other_eval_temperatures)):
            require(taken not in reported, "eval_dataset", name, f"two sets have results named {taken}; rename it")
            reported[taken] = rows
    name = args.metric_for_best_model
    if name is None or eval_dataset is None or args.eval_strategy == "no" or not known_metrics:
        return
    metric = name if name.startswith("eval_") else f"eval_{name}"
    is_reported = any(
        metric.startswith(f"{prefix}_")
        and has_metric(metric.removeprefix(f"{prefix}_"), {row.get("task_type") for row in rows}, environments)
        for prefix, rows in reported.items()
    )
    remedy = f"no evaluation reports it: set it to {' or '.join(f'{prefix}_success_rate' for prefix in reported)}"
    require(is_reported, "metric_for_best_model", name, remedy)
