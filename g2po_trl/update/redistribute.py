"""Transfer of step samples from the rank that played them to the rank that trains them.

All ranks receive the lengths and advantages of all samples and their order (`prefix_order`), and make the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..utils.images import Picture, read_png
from ..utils.ranks import all_to_all
from .balance import RowSummary
from .batch import BatchingConfig, StepBatch, collate_plan
from .prefix_order import order_over_ranks


def make_mini_batches_over_ranks(
    local: StepBatch,
    rank: int,
    config: BatchingConfig,
    rng: np.random.Generator,
    gather: Callable[[Any], list[Any]],
    device: torch.device,
) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    """Return this rank's mini-batches, as `make_mini_batches` of all ranks' rows. All ranks call it together.

    `gather` returns the objects of all ranks, by rank; `device` is that of the tensors that ranks exchange.
    """
    rows = RowSummary.concatenate(gather(local.summary))
    plan, metrics = config.plan(rows, order_over_ranks(local.sequences(config.owners_of), rank, gather, device), rng)
    dealt = [
        sorted(row for part in plan for planned in part for row in planned.rows[to]) for to in range(len(rows.counts))
    ]
    own = exchange(local, rows, dealt, rank, gather, device)
    if rows.with_images:
        own.images = exchange_images(local, rows, dealt, rank, gather, device)
    place_of = {row: place for place, row in enumerate(dealt[rank])}
    return collate_plan(plan, own, place_of, rows, rank, config), metrics


def exchange(
    local: StepBatch,
    rows: RowSummary,
    dealt: Sequence[Sequence[int]],
    rank: int,
    gather: Callable[[Any], list[Any]],
    device: torch.device,
) -> StepBatch:
    """Return the rows that this rank trains, `dealt[rank]`, in order. All ranks call it together."""
    parts = []
    for of_rank in _own_rows(rows, dealt, rank):
        pieces = [np.zeros(0, dtype=np.int32)]
        for row in of_rank:
            pieces += [local.prompt_ids[row], local.completion_ids[row]]
            if rows.with_logprobs:
                pieces.append(local.logprobs[row].view(np.int32))
        parts.append(np.concatenate(pieces))
    received = np.concatenate(all_to_all(parts, rank, gather, device))
    own = np.asarray(dealt[rank], dtype=np.int64)
    columns = [rows.prompts, rows.completions, *([rows.completions] if rows.with_logprobs else [])]
    ends = np.cumsum(np.stack([column[own] for column in columns], axis=1))
    fields = np.split(received, ends[:-1]) if len(own) else []
    return StepBatch(
        fields[0 :: len(columns)],
        fields[1 :: len(columns)],
        rows.advantages[own],
        rows.trained[own],
        [ids.view(np.float32) for ids in fields[2 :: len(columns)]] if rows.with_logprobs else None,
    )


def exchange_images(
    local: StepBatch,
    rows: RowSummary,
    dealt: Sequence[Sequence[int]],
    rank: int,
    gather: Callable[[Any], list[Any]],
    device: torch.device,
) -> list[list[Picture]]:
    """Return the images of the rows that this rank trains, as `exchange`; each goes to a rank once."""
    parts, images = [], local.images_of_rows
    for of_rank in _own_rows(rows, dealt, rank):
        files = {image: image.png for row in of_rank for image in images[row]}
        head = json.dumps([[images[row] for row in of_rank], {name: len(png) for name, png in files.items()}]).encode()
        sent = b"".join([len(head).to_bytes(8, "big"), head, *files.values()])
        parts.append(np.frombuffer(sent + bytes(-len(sent) % 4), dtype=np.int32))
    received = []
    for part in all_to_all(parts, rank, gather, device):
        data = part.tobytes()
        end = 8 + int.from_bytes(data[:8], "big")
        names, sizes = json.loads(data[8:end])
        ends = (end + np.cumsum([0, *sizes.values()])).tolist()
        known = {name: read_png(data[start:stop]) for name, start, stop in zip(sizes, ends, ends[1:])}
        received += [[known[name] for name in of_row] for of_row in names]
    return received


def _own_rows(rows: RowSummary, dealt: Sequence[Sequence[int]], rank: int) -> list[list[int]]:
    """Return for each rank the places of this rank's rows that it trains."""
    first, stop = rows.first[rank : rank + 2]
    return [[row - first for row in of_rank if first <= row < stop] for of_rank in dealt]
