"""Evaluations of a run: sets of tasks (panels), played on all ranks, and their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset

from ..engines.sampling import derived_seed
from ..trajectory import Trajectory
from ..utils.options import require
from .metrics import flat, is_metric, summarize
from .output_dir import RunFolder, check_panel_name
from .summary import at_temperature


@dataclass
class PanelEvaluation:
    """Plays evaluation sets with the current policy of a run, and records the results."""

    args: Any  # a `G2POConfig`
    play: Callable[..., tuple[list[Trajectory], Any]]  # plays tasks with a sampling and seeds on this rank
    rollout: Callable[[], AbstractContextManager[None]]  # several of them are in one
    folder: RunFolder  # records the results
    accelerator: Accelerator

    def play_all(self, dataset: Iterable[dict], temperature: float) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """Return the trajectories of an evaluation set, of all ranks, and the row of each; all ranks call it."""
        args, accelerator = self.args, self.accelerator
        sampling, size = args.evaluation_sampling(temperature), args.per_device_eval_batch_size
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        rows = [row for row in dataset for _ in range(args.num_generations_eval)]
        seeds = [derived_seed(args.eval_seed, number) for number in range(len(rows))][rank::num_ranks]
        local, played = rows[rank::num_ranks], []
        with torch.random.fork_rng(devices), self.rollout():
            torch.manual_seed(args.eval_seed + rank)  # for engines that take no seeds
            for first in range(0, math.ceil(len(rows) / num_ranks), size):  # as often on every rank
                part = slice(first, first + size)
                played += self.play(local[part], sampling, description="evaluation", seeds=seeds[part])[0]
        return tuple(map(list, zip(*gather_object(list(zip(played, local))))))

    def __call__(self, dataset: Dataset, prefix: str, temperature: float, step: int) -> dict[str, float]:
        """Play an evaluation set on all ranks, and return its metrics, with a prefix."""
        started = time.perf_counter()
        trajectories, rows = self.play_all(dataset, temperature)
        summary = summarize(trajectories, [row.get("task_type") for row in rows])
        if self.accelerator.is_main_process:
            self.folder.add_evaluation(prefix, step, temperature, summary, trajectories, dataset)
        metrics = {f"{prefix}_{name}": value for name, value in flat(summary).items()}
        return metrics | {f"{prefix}_runtime": time.perf_counter() - started}


def panels_by_prefix(dataset: Dataset | Mapping | str | None, known: Dataset | Mapping | None, prefix: str) -> dict:
    """Return the evaluation sets to play by the prefix of their metrics.

    `dataset`: tasks, sets by name, the name of one of the run's (`known`), or `None`: these. `prefix`: of one without
    a name; a prefix that ends with the name of the set is complete.
    """
    if isinstance(dataset, str):
        names = list(known) if isinstance(known, Mapping) else []
        require(dataset in names, "eval_dataset", dataset, f"the trainer's named evaluation sets are {names}")
        dataset = {dataset: known[dataset]}
    named = known if dataset is None else dataset
    if not isinstance(named, Mapping):
        named = {prefix: named}
    else:
        named = {f"{prefix.removesuffix(f'_{name}')}_{name}": rows for name, rows in named.items()}
    for name, rows in named.items():
        check_panel_name(name)
        require(rows is not None and len(rows) > 0, "eval_dataset", rows, "pass the tasks to evaluate on")
    return named


def check_evaluations(args: Any, eval_dataset: Dataset | Mapping | None, known_metrics: bool = True) -> None:
    """Refuse names of evaluation sets that are no file names or clash, and a best metric that none reports.

    `known_metrics`: evaluations report `METRICS` alone. transformers would fail after the first evaluation.
    """
    names = list(eval_dataset) if isinstance(eval_dataset, Mapping) else []
    for name in names:
        check_panel_name(name, "eval_dataset")
    prefixes = [f"eval_{name}" for name in names] or ["eval"]
    prefixes += [at_temperature(prefix, other) for prefix in prefixes for other in args.other_eval_temperatures]
    require(len({*prefixes}) == len(prefixes), "eval_dataset", names, f"their results, {prefixes}, have equal names")
    best = args.metric_for_best_model
    if best is None or eval_dataset is None or args.eval_strategy == "no" or not known_metrics:
        return
    metric = f"eval_{best.removeprefix('eval_')}"
    names = [metric.removeprefix(f"{prefix}_") for prefix in prefixes if metric.startswith(f"{prefix}_")]
    remedy = f"no evaluation reports it: set it to {' or '.join(f'{prefix}_success_rate' for prefix in prefixes)}"
    require(any(map(is_metric, names)), "metric_for_best_model", best, remedy)
