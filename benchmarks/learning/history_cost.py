"""CPU seconds and positions of an update by window and by conversation, on rollouts of the two runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import facts, interleaved, medians
from benchmarks.speed.phases import count, make_trainer, update
from g2po_trl import StateGraph, g2po, read_jsonl
from g2po_trl.update.batch import StepBatch

GROUP = 8


def batch_of(path: Path) -> StepBatch:
    """Return the step samples of a recorded rollout."""
    trajectories = list(read_jsonl(path))
    groups = [trajectories[place : place + GROUP] for place in range(0, len(trajectories), GROUP)]
    return StepBatch.from_trajectories(trajectories, g2po(StateGraph.from_groups(groups)))


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of this process, which other jobs on the machine change least."""
    started = time.process_time()
    run()
    return round(time.process_time() - started, 3)


def cost(recorded: dict[str, Path], sizes: Sequence[int | None], repetitions: int) -> dict[str, Any]:
    """Return positions, and CPU seconds of interleaved updates, of each recorded rollout.

    Args:
        recorded: history -> a rollout of its run.
        sizes: values of `mini_batch_size`; `None`: one mini-batch, which is counted and not measured.
        repetitions: updates of each kind.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = make_trainer(Path(folder), len(list(read_jsonl(next(iter(recorded.values()))))))
        runs, counts = {}, {}
        for history, path in recorded.items():
            batch = batch_of(path)
            tokens = sum(map(sum, batch.lengths(range(len(batch)))))
            for size in sizes:
                trainer.update.config.mini_batch_size = size
                mini_batches, metrics = trainer.update.split(batch)
                micro_batches = [one for mini_batch in mini_batches for one in mini_batch]
                name = f"{history}, {'one mini-batch' if size is None else f'mini-batches of {size}'}"
                counts[name] = {"step samples": len(batch), "tokens": tokens, "mini-batches": len(mini_batches)}
                counts[name] |= count(micro_batches, trainer.model)
                counts[name] |= {key: round(value, 4) for key, value in metrics.items()}
                if size is not None:
                    runs[f"log-probabilities, {name}"] = partial(trainer._add_log_probs, mini_batches)
                    runs[f"update, {name}"] = partial(update, trainer, micro_batches)
        seconds = interleaved({name: lambda _, run=run: cpu_seconds(run) for name, run in runs.items()}, repetitions)
        trainer.close()
    return {**facts("torch", "trl"), "counts": counts, "CPU seconds": seconds, "medians": medians(seconds, 3)}
