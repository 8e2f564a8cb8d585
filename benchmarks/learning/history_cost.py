"""Seconds and positions of an update by window and by conversation, on rollouts of the two runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import facts, interleaved, medians
from benchmarks.speed.phases import count, make_trainer, measure, update
from g2po_trl import StateGraph, g2po, read_jsonl
from g2po_trl.update.batch import StepBatch

GROUP = 8


def batch_of(path: Path) -> StepBatch:
    """Return the step samples of a recorded rollout."""
    trajectories = list(read_jsonl(path))
    groups = [trajectories[place : place + GROUP] for place in range(0, len(trajectories), GROUP)]
    return StepBatch.from_trajectories(trajectories, g2po(StateGraph.from_groups(groups)))


def cost(recorded: dict[str, Path], sizes: Sequence[int | None], repetitions: int) -> dict[str, Any]:
    """Return positions, and seconds of interleaved updates, of each recorded rollout.

    Args:
        recorded: history -> a rollout of its run.
        sizes: values of `mini_batch_size`; `None`: one mini-batch.
        repetitions: updates of each kind.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = make_trainer(Path(folder), len(list(read_jsonl(next(iter(recorded.values()))))))
        runs, counts = {}, {}
        for history, path in recorded.items():
            batch = batch_of(path)
            tokens = sum(map(sum, batch.lengths(range(len(batch)))))
            for size in sizes:
                trainer.update.mini_batch_size = size
                mini_batches, metrics = trainer.update.split(batch)
                micro_batches = [one for mini_batch in mini_batches for one in mini_batch]
                name = f"{history}, {'one mini-batch' if size is None else f'mini-batches of {size}'}"
                counts[name] = {"step samples": len(batch), "tokens": tokens, "mini-batches": len(mini_batches)}
                counts[name] |= count(micro_batches, trainer.model)
                counts[name] |= {key: round(value, 4) for key, value in metrics.items()}
                runs[f"log-probabilities, {name}"] = partial(trainer._add_log_probs, mini_batches)
                runs[f"update, {name}"] = partial(update, trainer, micro_batches)
        seconds = interleaved(
            {name: lambda _, run=run: round(measure(trainer, run), 4) for name, run in runs.items()}, repetitions
        )
        trainer.close()
    return {**facts("torch", "trl"), "counts": counts, "seconds": seconds, "medians": medians(seconds, 3)}
